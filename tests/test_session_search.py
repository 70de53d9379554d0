"""The search over sessions."""

from __future__ import annotations

from typing import Any

import pytest

from access_tokens import USER_URN
from session_search import check_session, parse_finish, parse_search, project_of, search, status_of, text_metadata
from wire_format import RequestError

RECORDS = [
    {"session_id": "a", "created": 1.0, "display_name": "Nightly run", "project_id": "p1"},
    {"session_id": "b", "created": 2.0, "user_metadata": {"round": 1, "kind": "x"}, "finish": {"type": "success"}},
    {"session_id": "c", "created": 3.0, "display_name": "run by NIGHT", "finish": {"type": "errored", "detail": "d"}},
    {"session_id": "d", "created": 3.0, "display_name": "day run"},
    {"session_id": "e", "created": 5.0},
]
ALIVE = {"a", "d"}


def found(**body: Any) -> list[str]:
    page, _ = search(RECORDS, parse_search(body), ALIVE)
    return [record["session_id"] for record in page]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "edcba"),
        ({"session_id": "b"}, "b"),
        ({"session_id": "zz"}, ""),
        ({"display_name": "RUN night"}, "ca"),
        ({"display_name": "day", "session_id": "b"}, "db"),
        ({"project_ids": ["p1"]}, "a"),
        ({"project_ids": ["local"]}, "edcb"),
        ({"project_ids": []}, ""),
        ({"user_metadata": {"round": "1"}}, "b"),
        ({"user_metadata": {"round": "1", "kind": "y"}}, ""),
        ({"owner": {"type": "accessible"}}, "edcba"),
        ({"owner": {"type": "user", "owner_urns": [USER_URN]}}, "edcba"),
        ({"owner": {"type": "user", "owner_urns": ["somebody else"]}}, ""),
        ({"statuses": [{"type": "active"}]}, "da"),
        ({"statuses": [{"type": "client_finished"}]}, "cb"),
        ({"statuses": [{"type": "client_finished", "reasons": ["errored", "interrupted"]}]}, "c"),
        ({"statuses": [{"type": "failed"}, {"type": "cancelled"}]}, ""),
        ({"statuses": [{"type": "active"}, {"type": "client_finished", "reasons": ["success"]}]}, "dba"),
    ],
)
def test_filters(body: dict[str, Any], expected: str) -> None:
    assert "".join(found(**body)) == expected


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_pages_follow_each_other_without_gap_or_repetition(limit: int) -> None:
    seen, cursor, pages = [], None, 0
    while pages == 0 or cursor is not None:
        page, cursor = search(RECORDS, parse_search({"limit": limit, "cursor": cursor}), ALIVE)
        seen += [record["session_id"] for record in page]
        pages += 1
    assert "".join(seen) == "edcba"
    assert pages == -(-5 // limit)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 201}, "limit"),
        ({"display_name": ""}, "display_name"),
        ({"statuses": []}, "statuses"),
        ({"statuses": [{"type": "asleep"}]}, "statuses"),
        ({"cursor": {"last_session_id": "a"}}, "last_created_at"),
        ({"cursor": {"last_session_id": "a", "last_created_at": "2020-01-01T00:00:00"}}, "last_created_at"),
        ({"owner": {"type": "user", "owner_urns": []}}, "owner"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_a_malformed_search_is_refused_by_the_name_of_what_is_wrong(body: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestError, match=place):
        parse_search(body)


def test_how_a_session_stands() -> None:
    assert [status_of(record, ALIVE) for record in RECORDS] == [
        {"type": "active"},
        {"type": "client_finished", "reason": {"type": "success"}, "detail": None},
        {"type": "client_finished", "reason": {"type": "errored"}, "detail": "d"},
        {"type": "active"},
        None,
    ]
    assert project_of(RECORDS[0]) == "p1"
    assert project_of(RECORDS[1]) == "local"
    assert text_metadata(RECORDS[1]["user_metadata"]) == {"round": "1", "kind": "x"}
    assert text_metadata(None) is None
    assert text_metadata({"half \ud800": "\ud800"}) == {"half \\ud800": "\\ud800"}


def test_what_a_client_says_of_its_session_is_checked() -> None:
    assert parse_finish({}) is None
    assert parse_finish({"reason": {"type": "interrupted"}, "detail": "x"}) == {"type": "interrupted", "detail": "x"}
    wrong: list[dict[str, Any]] = [{"reason": {"type": "done"}}, {"reason": {"type": ["x"]}}]
    for body in [*wrong, {"reason": {"type": "success"}, "detail": 3}]:
        with pytest.raises(RequestError):
            parse_finish(body)
    assert check_session({"display_name": None, "user_metadata": {"a": 1}})["user_metadata"] == {"a": 1}
    for name, value in (("display_name", 3), ("display_name", "\ud800"), ("project_id", []), ("user_metadata", [])):
        with pytest.raises(RequestError, match=name):
            check_session({name: value})
