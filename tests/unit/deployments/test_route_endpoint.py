"""`POST .../route` and `brimful route` against it: what is told, that nothing is sent, and how refusals read."""

from __future__ import annotations

import io
import json
from typing import Any

import httpx
import pytest
from rich.console import Console
from starlette.applications import Starlette

from deployments.cli.route import ask_route, body_of, one_line, show_explanation, why
from deployments.error_map import STATUS_BY_CODE
from deployments.model_client_fake import FakeModelClient
from deployments.route_endpoint import MAX_AT_ONCE, explained_route
from deployments.routes import ERROR_HANDLERS
from replica.errors import BrimfulError, InvalidRequest, Unavailable, UnknownModel
from replica.scheduler.block_hash import block_hashes
from router.config import RouterConfig
from router.scorers.cost_s import COMPANY
from router.state import RouterState
from tests.unit.deployments.generation_site import BUNDLE, SHAPE, Site
from tests.unit.router.loads import report

TEXT = "hello there"
PROMPT = [7] * 11
NUM_TOKENS = len(PROMPT)
RATES: dict[str, Any] = {"prefill_tokens_per_s": 100.0, "decode_tokens_per_s": 100.0}
SMALL_BLOCKS: dict[str, Any] = {**RATES, "block_size": 4}


class Asked(Site):
    """A model "m" with replicas r0 (5 requests run), r1 (idle) and r2 (drains), its router behind `/route`."""

    def __init__(self, *replica_ids: str, loaded: bool = True, router: str = "scores", **settings: Any) -> None:
        names = replica_ids or ("r0", "r1", "r2")
        self.fake = FakeModelClient(*names, facts=(BUNDLE, SHAPE))
        self.fake.router = RouterState(RouterConfig(policy=router, ramp_s=0.0))
        loads: list[dict[str, Any]] = [{"num_running": 5}, {}, {"draining": True}]
        self.fake.reports = [report(name, **RATES, **load) for name, load in zip(names, loads, strict=False)]
        super().__init__(self.fake, loaded, **settings)
        self.app = Starlette(
            routes=[explained_route("/", {"m": self.model}, self.edge, "i1")], exception_handlers=ERROR_HANDLERS
        )

    async def post(self, body: object, host: str = "127.0.0.1", **headers: str) -> httpx.Response:
        if self._loaded:
            await self.model.load()
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http(host) as client:
            return await client.post("/route", content=content, headers=headers)

    def http(self, host: str = "127.0.0.1") -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url="http://service", transport=httpx.ASGITransport(self.app, client=(host, 1)))


async def told(here: Asked, **more: Any) -> dict[str, Any]:
    answer = await here.post({"model": "m", "prompt": PROMPT, "max_tokens": 10, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_completion_is_told_its_replica_and_why_without_being_sent() -> None:
    here = Asked()
    answer = await told(here)
    assert {name: answer[name] for name in ("model", "ingress", "policy", "replica", "reason")} == {
        "model": "m",
        "ingress": "i1",
        "policy": "weighted",
        "replica": "r1",
        "reason": "cost_s",
    }
    assert (answer["prompt_tokens"], answer["output_tokens"], answer["prompt_blocks"]) == (NUM_TOKENS, 10, 0)
    assert (answer["num_replicas"], answer["num_looked_at"], answer["num_caching"]) == (3, 3, 0)
    assert answer["settings"]["tau_s"] == 1.0
    assert (here.fake.calls, here.fake.requests, len(here.fake.router.ledger)) == ([], [], 0)
    assert len(here.fake.router.index) == 0


async def test_candidates_come_best_first_with_what_they_were_judged_by() -> None:
    idle, busy, out = (await told(Asked()))["candidates"]
    assert [one["replica_id"] for one in (idle, busy, out)] == ["r1", "r0", "r2"]
    assert (idle["running"], busy["running"], out["kept_out_by"], out["draining"]) == (0, 5, "draining", True)
    assert (out["total"], out["scores"], out["cost"]) == (None, {}, None)
    assert idle["scores"]["cost_s"]["weight"] == 1.0
    assert busy["cost"]["load_s"] == pytest.approx(5 * COMPANY * 10 / 100)
    parts = [value for name, value in busy["cost"].items() if name != "total_s"]
    assert (
        busy["cost"]["total_s"] == pytest.approx(sum(parts)) == pytest.approx(5 * COMPANY * 10 / 100 + NUM_TOKENS / 100)
    )
    assert busy["scores"]["cost_s"]["score"] == pytest.approx(1 / (1 + busy["cost"]["total_s"]))


async def test_what_is_cached_where_is_told() -> None:
    here = Asked()
    here.fake.reports = [report(name, **SMALL_BLOCKS) for name in ("r0", "r1", "r2")]
    answer = await told(here)
    assert (answer["prompt_blocks"], answer["cached_blocks"]) == (2, {})
    assert [one["home"] for one in answer["candidates"]] == [True, False, False]
    here.fake.router.index.learn("r0", block_hashes(PROMPT, 4))
    answer = await told(here)
    assert (answer["cached_blocks"], answer["num_caching"]) == ({"r0": 2}, 1)
    by_id = {one["replica_id"]: one for one in answer["candidates"]}
    assert (by_id["r0"]["matched_blocks"], by_id["r0"]["cached_tokens"], by_id["r1"]["cached_tokens"]) == (2, 8, 0)


async def test_a_chat_is_told_apart_by_its_messages() -> None:
    answer = await Asked().post({"model": "m", "messages": [{"role": "user", "content": TEXT}]})
    assert answer.status_code == 200
    chat = answer.json()["prompt_tokens"]
    raw = (await told(Asked(), prompt=TEXT))["prompt_tokens"]
    assert chat > raw > 0, "the template's tokens count"


async def test_replicas_that_never_spoke_are_told_with_nulls() -> None:
    here = Asked("new")
    here.fake.reports = []
    answer = await told(here)
    (only,) = answer["candidates"]
    assert (answer["reason"], answer["report_age_s"]) == ("only_candidate", None)
    names = ("report_age_s", "running", "waiting", "kv_usage_ratio", "blocks_available", "draining")
    assert ([only[name] for name in names], only["stale"]) == ([None] * 6, True)


@pytest.mark.parametrize("policy", ["round_robin", "power_of_two", "least_in_flight", "session_affinity"])
async def test_every_policy_explains_itself(policy: str) -> None:
    answer = await told(Asked(router=policy))
    assert answer["policy"] == policy
    assert answer["candidates"][0]["cost"] is None
    assert why(answer).endswith(".") and shown(answer)


async def test_what_names_a_session_goes_to_one_place_and_what_names_none_is_told_to_go_anywhere() -> None:
    here = Asked(router="session_affinity")
    told_of = [await told(here, prompt=[7] * length, prompt_cache_key="talk") for length in (1, 40, 80)]
    assert len({answer["replica"] for answer in told_of}) == 1
    assert [answer["session_by"] for answer in told_of] == ["session"] * 3
    assert why(told_of[0]).startswith(f"session_affinity: {told_of[0]['replica']} is where the session belongs")
    assert (await told(here, prompt=[7] * 40))["session_by"] == "prompt"
    short = await told(here, prompt=[7])
    assert short["session_by"] == "request"
    assert f"so it may go anywhere: to {short['replica']}, or to another one" in why(short)
    assert (await told(Asked(), prompt_cache_key="talk"))["session_by"] is None


async def test_of_very_many_replicas_a_bounded_number_is_listed() -> None:
    here = Asked(*[f"r{i}" for i in range(1000)])
    answer = await told(here)
    assert answer["num_replicas"] == 1000
    assert len(answer["candidates"]) <= min(64, answer["num_looked_at"]) and answer["num_looked_at"] <= 65


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"model": "m", "prompt": ["a", "b"]}, 400, "one at a time"),
        ({"model": "m", "prompt": "a", "messages": []}, 400, "messages and prompt can't be given both"),
        ({"model": "m"}, 400, "messages or prompt is required"),
        ({"prompt": "a"}, 400, "model is required"),
        ({"model": "other", "prompt": "a"}, 404, "'other' isn't served here; served: m"),
        ({"model": "m", "prompt": "a", "max_tokens": 0}, 400, "max_tokens: "),
        ({"model": "m", "prompt": "a", "priority": 1}, 400, "knows no priority"),
        ({"model": "m", "prompt": ""}, 400, "the prompt has no tokens"),
        ({"model": "m", "prompt": "a" * 5000}, 400, "256"),
        ([], 400, "must be a JSON object"),
        (b"\xff", 400, "isn't valid JSON"),
        (b" " * 10_001, 413, "larger than 10000 bytes"),
    ],
)
async def test_what_is_refused_is_named(body: object, status: int, words: str) -> None:
    answer = await Asked(max_body_bytes=10_000).post(body)
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("limits_from", "host", "headers", "status"),
    [
        ("this-machine", "127.0.0.1", {}, 200),
        ("this-machine", "10.0.0.7", {}, 403),
        ("this-machine", "127.0.0.1", {"origin": "http://page.example"}, 403),
        ("this-machine", "127.0.0.1", {"x-forwarded-for": "127.0.0.1"}, 403),
        ("anywhere", "10.0.0.7", {"origin": "http://page.example"}, 200),
        ("nowhere", "127.0.0.1", {}, 403),
    ],
)
async def test_what_is_cached_is_told_to_those_only_who_may_change_limits(
    limits_from: str, host: str, headers: dict[str, str], status: int
) -> None:
    answer = await Asked(limits_from=limits_from).post({"model": "m", "prompt": PROMPT}, host, **headers)
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["error"]["message"].startswith("decisions can")


async def test_while_the_model_loads_and_without_replicas_it_is_503_and_while_draining_it_answers() -> None:
    body = {"model": "m", "prompt": TEXT}
    assert (await Asked(loaded=False).post(body)).status_code == 503
    here = Asked()
    here.edge.in_flight.draining = True
    assert (await here.post(body)).status_code == 200
    here.fake.replica_ids.clear()
    refusal = await here.post(body)
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "unavailable")


async def test_more_questions_than_are_answered_at_once_are_refused_and_none_is_kept() -> None:
    here = Asked(body_timeout_s=0.05)
    waiting = [await here.send(None, "/route") for _ in range(MAX_AT_ONCE + 1)]
    for exchange in waiting:
        await exchange.end()
    assert sorted(exchange.status or 0 for exchange in waiting) == [400] * MAX_AT_ONCE + [
        STATUS_BY_CODE["queue_full"][0]
    ]
    assert (await here.post({"model": "m", "prompt": PROMPT})).status_code == 200


# ---- the command ----


def shown(answer: dict[str, Any], width: int = 100) -> list[str]:
    out = io.StringIO()
    show_explanation(answer, Console(file=out, width=width))
    assert "…" not in out.getvalue()
    return [" ".join(line.split()) for line in out.getvalue().splitlines() if line.strip()]


async def test_one_line_names_replica_reason_and_cost() -> None:
    assert one_line(await told(Asked())) == "replica r1 (cost_s), expected to cost 0.110 s"


async def test_the_table_and_the_sentence_say_why_the_winner_won() -> None:
    answer = await told(Asked())
    for candidate in answer["candidates"]:
        candidate["report_age_s"] = 0.25
    lines = shown(answer)
    assert [line for line in lines if line.startswith(("r0 ", "r1 ", "r2 ")) and "is expected" not in line] == [
        "r1 0.901 0.110 0.000 0.000 0.110 0 0 0 0% 0 0.2",
        "r0 0.794 0.260 0.150 0.000 0.110 5 0 0 0% 0 0.2",
        "r2 - - - - - 0 0 0 0% 0 0.2 draining",
    ]
    assert why(answer) == (
        "r1 is expected to cost 0.110 s, r0 0.260 s; the largest part of the difference is load (0.150 s less)."
    )
    assert any(line.startswith("As ingress i1 sees it") for line in lines)


async def test_equals_and_a_single_one_and_a_stale_one_are_said_in_words() -> None:
    here = Asked("a", "b")
    here.fake.reports = [report(name, **RATES) for name in "ab"]
    answer = await told(here)
    assert answer["reason"] == "tie"
    assert "score the same, 0.901 and 0.901: they take turns." in why(answer)
    assert why(await told(Asked("a"))) == "a is the only replica."
    here.fake.router.distrust("b")
    assert why(await told(here)).endswith("by its last report, which is too old to be believed.")


async def test_all_draining_is_said_in_words() -> None:
    here = Asked("a", "b")
    here.fake.reports = [report(name, **RATES, draining=True, num_running=load) for name, load in (("a", 0), ("b", 9))]
    assert why(await told(here)).startswith(
        "All replicas drain, so that is no reason against any of them. a is expected"
    )


async def test_the_table_of_a_policy_without_costs_has_no_cost() -> None:
    lines = shown(await told(Asked(router="round_robin")))
    assert not any("cost" in line for line in lines)


async def served(here: Asked) -> httpx.AsyncClient:
    await here.model.load()
    return here.http()


async def test_the_command_asks_as_the_endpoint_understands() -> None:
    async with await served(Asked()) as client:
        chat = await ask_route(client, "m", body_of(TEXT, chat=True, max_tokens=7))
        raw = await ask_route(client, "m", body_of(TEXT, chat=False, max_tokens=None))
        assert chat["output_tokens"] == 7 < raw["output_tokens"]
        assert chat["prompt_tokens"] > raw["prompt_tokens"]
        with pytest.raises(UnknownModel, match="served: m"):
            await ask_route(client, "huge", body_of(TEXT, chat=True, max_tokens=None))
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await ask_route(client, "m", body_of(TEXT, chat=True, max_tokens=0))
        with pytest.raises(Unavailable, match="no brimful answers at http://service"):  # no /v1/models there
            await ask_route(client, None, body_of(TEXT, chat=True, max_tokens=None))


@pytest.mark.parametrize("answer", [b"[]", b'{"detail": "no such route"}', b"<html>", b'{"error": "x"}'])
async def test_another_service_at_the_url_is_one_line(answer: bytes) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=answer))
    async with httpx.AsyncClient(base_url="http://service", transport=transport) as client:
        for model in ("m", None):
            with pytest.raises(BrimfulError, match="http://service"):
                await ask_route(client, model, body_of(TEXT, chat=True, max_tokens=None))
