"""Tokens and signed addresses: good for their signer, their path and their time alone."""

from __future__ import annotations

import time
from urllib.parse import parse_qs

import pytest
from tinker.lib._jwt_auth import jwt_claims

import access_tokens
from access_tokens import Signer


def test_a_token_names_the_user_and_is_good_for_its_signer_alone() -> None:
    signer = Signer()
    token = signer.issue_token()
    assert token.startswith(access_tokens.TOKEN_PREFIX)
    assert jwt_claims(token)["sub"] == access_tokens.USER_URN
    assert signer.check_token(token)
    assert not Signer().check_token(token)
    head, claims, signature = token.split(".")
    assert not signer.check_token(f"{head}.{claims}x.{signature}")
    assert not signer.check_token(f"{head}.{claims}")
    assert not signer.check_token("eyJ")


def test_a_token_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    signer = Signer()
    token = signer.issue_token()
    later = time.time() + access_tokens.TOKEN_LIFE_S + 1
    monkeypatch.setattr(access_tokens.time, "time", lambda: later)
    assert not signer.check_token(token)


def test_a_signed_address_is_good_for_one_path_until_its_end() -> None:
    signer = Signer()
    ends = int(time.time()) + 60
    query = {name: values[0] for name, values in parse_qs(signer.sign_url("/a/b", ends)).items()}
    assert signer.check_url("/a/b", **query)
    assert not signer.check_url("/a/c", **query)
    assert not signer.check_url("/a/b", **{**query, "expires": str(ends + 1)})
    assert not signer.check_url("/a/b", **{**query, "signature": "é"})
    assert not signer.check_url("/a/b", "", "")
    over = {name: values[0] for name, values in parse_qs(signer.sign_url("/a/b", ends - 61)).items()}
    assert not signer.check_url("/a/b", **over)
