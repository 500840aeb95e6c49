"""`/limits` and `brimful limits` against it: what is shown, who may change what, and how refusals read."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import httpx
import pytest
from rich.console import Console
from starlette.applications import Starlette
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from deployments.cli.limits import change_limits, fetch_limits, given_limits, show_limits
from deployments.config import IngressSettings, ModelSettings
from deployments.limited_replicas_fake import FakeLimitedReplicas
from deployments.limits_endpoint import MAX_BODY_BYTES, LimitsOfModel, limits_routes
from deployments.live_limits import LiveLimits
from deployments.model_client_fake import FakeModelClient
from deployments.sender_check import PROXY_HEADERS
from deployments.served_model import ServedModel
from replica.config import SchedulerConfig
from replica.errors import BrimfulError, InvalidRequest, SettingError, UnknownModel

START = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, watermark=0.5)


class Site:
    """An ingress's `/limits` for models "small" on / and "large" on /large, two replicas each."""

    def __init__(self, *names: str, **settings: Any) -> None:
        self.replicas: dict[str, FakeLimitedReplicas] = {}
        entries = []
        for name in names or ("small", "large"):
            replicas = self.replicas[name] = FakeLimitedReplicas()
            for number in (1, 2):
                replicas.start(f"{name}-{number}", START)
            route = "/large" if name == "large" else "/"
            model = ServedModel(ModelSettings(served_model_name=name, route=route), START, FakeModelClient(), 0)
            entries.append(LimitsOfModel(model, LiveLimits(replicas, "i")))
        self.app = Starlette(routes=limits_routes(entries, IngressSettings(**settings)))

    def client(self, host: str = "127.0.0.1") -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, client=(host, 1))
        return httpx.AsyncClient(base_url="http://service", transport=transport)

    async def post(self, body: object, host: str = "127.0.0.1", **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.client(host) as client:
            return await client.post("/limits", content=content, headers=headers)

    def tokens(self, name: str = "small") -> set[int]:
        return {replica.now.max_num_batched_tokens for replica in self.replicas[name].replicas.values()}


HALF = {"model": "small", "limits": {"max_num_batched_tokens": 32}}


async def test_many_who_ask_at_once_cost_two_rounds() -> None:
    site = Site("small")
    async with site.client() as client:
        answers = await asyncio.gather(*(client.get("/limits") for _ in range(40)))
    assert len({answer.content for answer in answers}) == 1
    assert site.replicas["small"].calls == [("small-1", "limits"), ("small-2", "limits")] * 2


async def test_limits_are_shown_for_all_models_with_start_and_range() -> None:
    async with Site().client() as client:
        models = (await client.get("/limits")).json()["models"]
    assert [(model["name"], model["route"], model["silent"]) for model in models] == [
        ("small", "/", []),
        ("large", "/large", []),
    ]
    replica = models[0]["replicas"][0]
    assert replica["replica_id"] == "small-1"
    assert replica["now"] == replica["start"]
    assert replica["now"]["max_num_batched_tokens"] == 64
    assert replica["allowed"]["max_num_batched_tokens"] == {
        "min": 9,
        "max": 64,
        "none": False,
        "words": "a whole number, at least max_num_seqs + 1 = 9, at most its start value, 64",
    }


async def test_a_change_answers_with_what_is_then_set() -> None:
    site = Site()
    answer = await site.post(HALF)
    assert answer.status_code == 200
    (model,) = answer.json()["models"]
    assert [replica["now"]["max_num_batched_tokens"] for replica in model["replicas"]] == [32, 32]
    assert (site.tokens("small"), site.tokens("large")) == ({32}, {64})


async def test_no_limit_is_null_and_reset_brings_the_start_values_back() -> None:
    site = Site("small")
    await site.post({"limits": {"max_num_partial_prefills": 3, "max_num_batched_tokens": 32}})
    await site.post({"limits": {"max_num_partial_prefills": None}})
    assert {r.now.max_num_partial_prefills for r in site.replicas["small"].replicas.values()} == {None}
    await site.post({"reset": True})
    assert site.tokens() == {64}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (
            {"limits": {"max_num_batched_tokens": 65}},
            400,
            "max_num_batched_tokens = 65 is not allowed: a whole number,",
        ),
        ({"limits": {"max_num_batched_tokens": 8}}, 400, "at least max_num_seqs + 1 = 9, at most its start value, 64"),
        ({"limits": {"max_num_batched_tokens": "32"}}, 400, "max_num_batched_tokens = '32' is not allowed"),
        ({"limits": {"max_num_batched_tokens": 32.0}}, 400, "max_num_batched_tokens = 32.0 is not allowed"),
        ({"limits": {"max_num_seqs": True}}, 400, "max_num_seqs = True is not allowed"),
        ({"limits": {"max_num_seqs": None}}, 400, "max_num_seqs = None is not allowed"),
        ({"limits": {"max_num_seqs": 10**300}}, 400, "max_num_seqs = 1000"),
        ({"limits": {"max_num_seqs": [1]}}, 400, "max_num_seqs = [1] is not allowed"),
        (b'{"limits": {"watermark": NaN}}', 400, "watermark = nan is not allowed: a number, at least 0, at most"),
        (b'{"limits": {"watermark": Infinity}}', 400, "watermark = inf is not allowed"),
        ({"limits": {"queue_timeout_s": 3}}, 400, "queue_timeout_s = 3 is not allowed: only these can change on a"),
        ({"limits": {"self": 3}}, 400, "self = 3 is not allowed: only these can change on a running replica: max_num"),
        ({"limits": {"max_num_seqs": 4}, "force": True}, 400, "force is not a known field"),
        ({"limits": 3}, 400, "limits: Input should be a valid dictionary"),
        ({"reset": 1}, 400, "reset: "),
        ({}, 400, "nothing to change"),
        ([], 400, "the body must be a JSON object"),
        (b"", 400, "isn't valid JSON"),
        (b"\xff", 400, "isn't valid JSON"),
        (b"[" * 4000, 400, "isn't valid JSON"),
        ({"model": "huge", "limits": {"max_num_seqs": 4}}, 404, "served: small on /, large on /large"),
        ({"model": "small", "route": "/large", "limits": {"max_num_seqs": 4}}, 404, "no such model"),
        ({"model": None, "limits": {"max_num_seqs": 4}}, 400, "several models are served: small on /, large on /large"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "larger than 4096 bytes"),
    ],
)
async def test_what_is_refused_changes_nothing_and_says_why(body: object, status: int, words: str) -> None:
    site = Site()
    named = {"model": "small"} | body if isinstance(body, dict) and status == 400 else body
    if isinstance(body, bytes) and body.startswith(b"{"):
        named = b'{"model": "small", ' + body[1:]
    answer = await site.post(named)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    starts = [replica.now for replicas in site.replicas.values() for replica in replicas.replicas.values()]
    assert starts == [START] * 4


async def test_a_silent_replica_is_503_and_named() -> None:
    site = Site("small")
    site.replicas["small"].silent = {"small-2"}
    answer = await site.post(HALF)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["error"]["message"] == "replica small-2 doesn't answer; nothing was changed"
    async with site.client() as client:
        (model,) = (await client.get("/limits")).json()["models"]
    assert (len(model["replicas"]), model["silent"]) == (1, ["small-2"])


async def test_a_change_that_lost_against_one_at_the_same_time_is_503() -> None:
    site = Site("small")
    other = LiveLimits(site.replicas["small"], "j")  # of one revision, the larger id wins
    answer, _ = await asyncio.gather(site.post(HALF), other.change({"max_num_batched_tokens": 48}, reset=False))
    assert (answer.status_code, site.tokens()) == (503, {48})
    assert answer.json()["error"]["message"].startswith("another change came at the same time and counts instead")


@pytest.mark.parametrize(
    ("limits_from", "host", "headers", "status"),
    [
        ("this-machine", "127.0.0.1", {}, 200),
        ("this-machine", "::1", {}, 200),
        ("this-machine", "::ffff:127.0.0.1", {}, 200),
        ("this-machine", "10.0.0.7", {}, 403),
        ("this-machine", "::ffff:10.0.0.7", {}, 403),
        ("this-machine", "no address", {}, 403),
        ("this-machine", "127.0.0.1", {"origin": "http://127.0.0.1:8000"}, 403),
        *(("this-machine", "127.0.0.1", {name: "127.0.0.1"}, 403) for name in PROXY_HEADERS),
        ("anywhere", "10.0.0.7", {"origin": "http://example.org"}, 200),
        ("anywhere", "127.0.0.1", {"x-forwarded-for": "10.0.0.7"}, 200),
        ("nowhere", "127.0.0.1", {}, 403),
    ],
)
async def test_who_may_change_limits(limits_from: str, host: str, headers: dict[str, str], status: int) -> None:
    site = Site(limits_from=limits_from)
    answer = await site.post(HALF, host, **headers)
    assert answer.status_code == status
    assert site.tokens() == ({32} if status == 200 else {64})
    if status == 403:
        assert answer.json()["error"]["code"] == "forbidden"
        assert "ingress.limits_from" in answer.json()["error"]["message"]
    async with site.client(host) as client:
        assert (await client.get("/limits")).status_code == 200, "everybody may look"


@pytest.mark.parametrize(
    ("host", "trusted", "named"),
    [
        ("10.0.0.7", "*", "127.0.0.1"),  # FORWARDED_ALLOW_IPS=*: a remote client names itself as it likes
        ("127.0.0.1", "127.0.0.1,::1", "10.0.0.7"),
        ("::ffff:127.0.0.1", "127.0.0.1,::1", "10.0.0.7"),  # a local proxy that uvicorn doesn't take for one
        ("127.0.0.2", "127.0.0.1,::1", "10.0.0.7"),
    ],
)
async def test_whom_a_proxy_names_does_not_count(host: str, trusted: str, named: str) -> None:
    site = Site("small")
    behind_uvicorn = ProxyHeadersMiddleware(site.app, trusted_hosts=trusted)  # type: ignore[arg-type]
    transport = httpx.ASGITransport(behind_uvicorn, client=(host, 1))  # type: ignore[arg-type]
    async with httpx.AsyncClient(base_url="http://service", transport=transport) as client:
        answer = await client.post("/limits", json=HALF, headers={"x-forwarded-for": named})
    assert (answer.status_code, site.tokens()) == (403, {64})
    assert "through a proxy (x-forwarded-for)" in answer.json()["error"]["message"]


# ---- the command ----


def table_of(answer: dict[str, Any]) -> list[str]:
    out = io.StringIO()
    show_limits(answer, Console(file=out, width=80))
    assert "…" not in out.getvalue()
    return [" ".join(line.split()) for line in out.getvalue().splitlines() if line.strip()]


async def test_the_table_shows_each_limit_now_at_the_start_and_its_range() -> None:
    site = Site()
    async with site.client() as client:
        await change_limits(client, HALF)
        assert table_of(await fetch_limits(client, "small", None))[0] == "small on /: 2 replicas"
        lines = table_of(await fetch_limits(client, "small", "/"))[3:]
    assert lines == [
        "max_num_seqs 8 8 1 to 8",
        "max_num_batched_tokens 32 64 9 to 64",
        "long_prefill_token_threshold 0 (none) 0 (none) 0 (none) or more",
        "max_num_partial_prefills none none 1 or more, none",
        "max_long_partial_prefills none none none",
        "watermark 0.5 0.5 0 to 0.5",
    ]


async def test_the_table_names_replicas_that_differ_or_plan_less_than_they_may_or_are_silent() -> None:
    site = Site("small")
    site.replicas["small"].start("small-3", SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=80))
    site.replicas["small"].start("small-4", START)
    site.replicas["small"].silent = {"small-4"}
    async with site.client() as client:
        answer = await fetch_limits(client, None, None)
    answer["models"][0]["replicas"][0]["in_force"]["max_num_batched_tokens"] = 16
    lines = table_of(answer)
    assert [line for line in lines if line.startswith(("small on", "max_num_batched", "replica", "device"))] == [
        "small on /: replicas small-1, small-2",
        "max_num_batched_tokens 64 64 9 to 64",
        "small on /: replica small-3",
        "max_num_batched_tokens 80 80 9 to 80",
        "replica small-1 still plans 16 tokens a step: its next step hasn't begun, or",
        "device memory is short",
        "replica small-4 doesn't answer",
    ]


async def test_a_refusal_names_the_flag() -> None:
    async with Site("small").client() as client:
        with pytest.raises(InvalidRequest) as caught:
            await change_limits(client, {"limits": {"max_num_batched_tokens": 65}})
    assert caught.value.message == (
        "--max-num-batched-tokens = 65 is not allowed: "
        "a whole number, at least max_num_seqs + 1 = 9, at most its start value, 64"
    )


async def test_a_model_that_is_not_served_is_named_with_those_that_are() -> None:
    async with Site().client() as client:
        with pytest.raises(UnknownModel, match="served: small on /, large on /large"):
            await fetch_limits(client, "huge", None)


@pytest.mark.parametrize("answer", [b"[]", b'{"detail": "no such route"}', b"<html>", b'{"error": "x"}'])
async def test_another_service_at_the_url_is_one_line(answer: bytes) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(404, content=answer))
    async with httpx.AsyncClient(base_url="http://service", transport=transport) as client:
        with pytest.raises(BrimfulError, match="http://service"):
            await fetch_limits(client, None, None)


def test_flags_become_limits_and_none_is_no_limit() -> None:
    flags: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_partial_prefills": "None",
        "max_long_partial_prefills": "3",
        "watermark": None,
    }
    assert given_limits(flags) == {"max_num_seqs": 4, "max_num_partial_prefills": None, "max_long_partial_prefills": 3}
    with pytest.raises(
        SettingError, match=r"^--max-num-partial-prefills = '2\.5' is not allowed: a whole number, or none"
    ):
        given_limits({"max_num_partial_prefills": "2.5"})
