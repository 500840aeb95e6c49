"""Publishing over real HTTP: what ends up in Grafana, twice the same, and one clear line for what can go wrong."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from dashboards.generate import boards
from dashboards.publish import PublishError, publish
from deployments.cli.commands import run
from replica.errors import StartupError
from tests.dashboards.exporters import serving
from tests.dashboards.grafana import LOGIN, READER_TOKEN, TOKEN, Grafana, grafana_server


@pytest.fixture(autouse=True)
def no_proxy_to_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishing uses the proxy that the environment names, as it should; these Grafanas are here."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def grafana() -> Grafana:
    return Grafana()


@pytest.fixture
def url(grafana: Grafana) -> Iterator[str]:
    with grafana_server(grafana) as address:
        yield address


def test_first_publish_makes_the_folder_and_every_board(grafana: Grafana, url: str) -> None:
    assert publish(url, TOKEN, folder="LLM serving") == [f"{url}/d/brimful-overview/brimful-overview"]
    assert grafana.folders == {"llm-serving": "LLM serving"}
    assert {uid: body["dashboard"] for uid, body in grafana.dashboards.items()} == {b.uid: b.json() for b in boards()}
    assert {body["folderUid"] for body in grafana.dashboards.values()} == {"llm-serving"}


def test_publishing_again_changes_nothing_but_the_boards(grafana: Grafana, url: str) -> None:
    first = publish(url, TOKEN)
    before = dict(grafana.folders)
    assert publish(url, TOKEN) == first
    assert grafana.folders == before == {"brimful": "brimful"}
    assert grafana.calls == ["/folders", "/dashboards/db", "/dashboards/db"]


def test_a_folder_made_by_hand_is_used(grafana: Grafana, url: str) -> None:
    grafana.folders["xyz123"] = "brimful"
    publish(url, TOKEN)
    assert grafana.folders == {"xyz123": "brimful"}
    assert grafana.dashboards["brimful-overview"]["folderUid"] == "xyz123"


def test_user_and_password_sign_in_also_beyond_ascii(grafana: Grafana, url: str) -> None:
    publish(url, user=LOGIN[0], password=LOGIN[1])
    assert list(grafana.dashboards) == ["brimful-overview"]


def test_chosen_data_source_is_shown_first(grafana: Grafana, url: str) -> None:
    publish(url, TOKEN, datasource_uid="prometheus")
    variable = grafana.dashboards["brimful-overview"]["dashboard"]["templating"]["list"][0]
    assert variable["current"] == {"text": "prometheus", "value": "prometheus"}


@pytest.mark.parametrize("ending", ["", "/"])
def test_grafana_under_a_path_is_found_and_its_addresses_are_whole(ending: str) -> None:
    grafana = Grafana(prefix="/monitoring/grafana")
    with grafana_server(grafana) as url:
        assert publish(url + ending, TOKEN) == [f"{url}/d/brimful-overview/brimful-overview"]


def refused(url: str, token: str | None = TOKEN, **others: str) -> str:
    """The message of the refusal: one line, an operator's error."""
    with pytest.raises(PublishError) as caught:
        publish(url, token, **others)
    assert isinstance(caught.value, StartupError)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_wrong_token_is_named(grafana: Grafana, url: str) -> None:
    assert refused(url, "wrong") == f"Grafana at {url} refuses the token or password (401)"
    assert refused(url, None, user="admin", password="wrong") == f"Grafana at {url} refuses the token or password (401)"
    assert grafana.calls == []


def test_token_that_may_only_read_is_named(url: str) -> None:
    assert refused(url, READER_TOKEN) == "the account may not change folder (403): it needs the role Editor"


def test_unknown_data_source_is_named_before_anything_is_changed(grafana: Grafana, url: str) -> None:
    message = refused(url, datasource_uid="no such/one")
    assert message == f"Grafana at {url} has no data source with the uid 'no such/one'"
    assert grafana.folders == {}


def test_broken_grafana_is_named(grafana: Grafana, url: str) -> None:
    grafana.broken = True
    assert refused(url) == f"Grafana at {url} fails on folders: Server Error 500: database is locked"


def test_unreachable_address_is_named() -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert refused(f"http://127.0.0.1:{port}").startswith(f"Grafana at http://127.0.0.1:{port} can't be reached: ")


@pytest.mark.parametrize("body", [b"<html>the message</html>", b'{"status": "fine"}', b'["database"]'])
def test_something_else_than_grafana_is_named(body: bytes) -> None:
    with serving({"/api/health": lambda: ("text/html", body)}) as port:
        address = f"http://127.0.0.1:{port}"
        assert refused(address) == f"{address} answers, but isn't Grafana; give the address of Grafana's start page"


def test_wrong_path_on_a_grafana_is_named(url: str) -> None:
    expected = f"{url}/wrong answers, but isn't Grafana; give the address of Grafana's start page"
    assert refused(f"{url}/wrong") == expected


@pytest.mark.parametrize("url", ["", "localhost:3000", "ftp://host", "http://", "http://host:99999", "http://[::1"])
def test_text_that_is_no_address_is_named(url: str) -> None:
    assert refused(url) == f"{url!r} is no address of a Grafana; one looks like http://localhost:3000"


def test_password_within_the_address_is_refused_and_not_repeated() -> None:
    assert refused("http://admin:secret@host") == "the address holds a user or a password; give them apart from it"


@pytest.mark.parametrize(
    ("token", "others"),
    [(None, {}), (None, {"user": "a"}), (None, {"password": "a"}), (TOKEN, {"user": "a", "password": "b"})],
)
def test_sign_in_needs_exactly_one_way(token: str | None, others: dict[str, str]) -> None:
    message = refused("http://host", token, **others)
    assert message == "give either a service account token, or a user and a password"


@pytest.mark.parametrize("token", ["", "  ", "two\nlines", "schlüssel"])
def test_token_that_can_be_none_is_refused(token: str) -> None:
    message = refused("http://host", token)
    assert message == "the token holds characters that no Grafana token has; was it copied whole?"


def test_empty_folder_title_is_refused() -> None:
    assert refused("http://host", folder=" ") == "the folder needs a title"


def test_command_line_publishes_and_prints_the_addresses(
    grafana: Grafana, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["dashboards", "publish", "--url", url, "--token", TOKEN]) == 0
    assert capsys.readouterr().out == f"{url}/d/brimful-overview/brimful-overview\n"
    assert list(grafana.dashboards) == ["brimful-overview"]


def test_command_line_says_what_is_wrong_in_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dashboards", "publish", "--url", url, "--token", "wrong"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert f"Grafana at {url} refuses the token or password (401)" in printed.err
