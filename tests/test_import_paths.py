"""Functions named by a configuration: found beside it or in the working folder, wherever a run is resumed."""

import json
import sys

import pytest

import config_schema
import import_paths
from error_handling import ConfigurationError


@pytest.fixture(autouse=True)
def _path_as_it_was(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_module_beside_the_configuration_or_in_the_working_folder_is_made_absolute(tmp_path, monkeypatch):
    beside, working = tmp_path / "configs", tmp_path / "work"
    for folder in (beside / "rules_here", working):
        folder.mkdir(parents=True)
    (beside / "rules_here" / "__init__.py").write_text("")
    (beside / "rules_here" / "choose.py").write_text("from . import sizes\n\ndef few(request):\n    return sizes.ALL\n")
    (beside / "rules_here" / "sizes.py").write_text("ALL = []\n")
    (working / "embeds_here.py").write_text("def embed(texts):\n    return texts\n")
    monkeypatch.chdir(working)
    config_file = beside / "config.json"
    config_file.write_text(
        json.dumps(
            {
                "base_model": "Qwen/Qwen3-8B",
                "train_file": "t.jsonl",
                "eval_file": "e.jsonl",
                "selection": {"strategy": "rules_here.choose:few", "embedding_model": "embeds_here:embed"},
            }
        )
    )
    selection = config_schema.load_and_validate_config(config_file).selection
    assert selection.strategy == f"{beside}/rules_here/choose.py:few"
    assert selection.embedding_model == f"{working}/embeds_here.py:embed"
    monkeypatch.chdir(tmp_path)
    few = import_paths.load_function(selection.strategy, key="k", n_arguments=1)
    assert (few.__module__, few(None)) == ("rules_here.choose", [])


def test_an_installed_module_is_imported_as_python_finds_it():
    assert import_paths.anchored("json:loads", ["/"]) == "json:loads"
    assert import_paths.load_function("json:loads", key="k", n_arguments=1) is json.loads


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def f(x):\n    return x\n1 / 0\n", "broken_of_test", "importing broken_of_test failed: ZeroDivisionError"),
        ("import sys\nsys.exit(0)\n", "leaving_of_test", "importing leaving_of_test failed: SystemExit: 0"),
        ("f = 3\n", "number_of_test", "f is of type int, expected a plain function"),
        ("def f(x):\n    return x\n", "json", "another module is called json .*; rename the file"),
    ],
)
def test_what_cannot_be_used_is_told_with_its_place(tmp_path, source, name, message):
    (tmp_path / f"{name}.py").write_text(source)
    with pytest.raises(ConfigurationError, match=message) as error:
        import_paths.load_function(f"{tmp_path}/{name}.py:f", key="selection.strategy", n_arguments=1)
    assert str(error.value).startswith(f"selection.strategy: {tmp_path}/{name}.py:f")


def test_no_file_and_no_import_path():
    with pytest.raises(ConfigurationError, match=r"there is no file /nowhere/mine\.py"):
        import_paths.load_function("/nowhere/mine.py:f", key="k", n_arguments=1)
    assert not import_paths.is_import_path("balanced")
    assert import_paths.is_import_path("a.b:c")


def test_an_unknown_strategy_is_told_with_the_nearest_name(tmp_path):
    path = tmp_path / "config.json"
    content = {"base_model": "m", "train_file": "t", "eval_file": "e", "selection": {"strategy": "balancd"}}
    path.write_text(json.dumps(content, indent=1))
    with pytest.raises(ConfigurationError) as error:
        config_schema.load_and_validate_config(path)
    assert f"{path}:6: selection.strategy: must be one of balanced_failures, " in str(error.value)
    assert 'or package.module:function, got "balancd"; did you mean balanced?' in str(error.value)
