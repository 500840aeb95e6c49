"""All commands of `brimful`, with their help. Each one only reads its flags and calls the module that does the work."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from typer.main import get_command

from deployments.cli import flags
from deployments.cli.bench import bench
from deployments.cli.console import Console, error_line
from deployments.cli.simulate import simulate
from replica.errors import BrimfulError, SettingError

URL = "http://127.0.0.1:8000"
EXIT_USAGE = 2
EXIT_UNFINISHED = 1
# The parent of all complaints about the command line, wherever this version of typer keeps it.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    help="Serve language models with every engine step full.", add_completion=False, rich_markup_mode=None
)
models = typer.Typer(help="Models on this machine.", rich_markup_mode=None)
dashboards = typer.Typer(help="The Grafana dashboards.", rich_markup_mode=None)
app.add_typer(models, name="models")
app.add_typer(dashboards, name="dashboards")
app.add_typer(simulate, name="simulate")
app.add_typer(bench, name="bench")

UrlOption = Annotated[str, typer.Option(help="base URL of the service")]


def serve(config: Path | None, address: str | None, ray_dashboard: bool, **given: Any) -> int:
    """Start the service on this machine and keep it up until Ctrl-C.

    Settings come from the flags, or from a file (the format of `serve deploy`) with the flags given put over it.
    """
    from deployments.cli.cluster import RayChoice
    from deployments.cli.serve import serve as run_service

    settings = flags.serve_config(config, {name: value for name, value in given.items() if value is not None})
    return run_service(settings, RayChoice(address, ray_dashboard), Console())


def _with_setting_flags() -> None:
    """Give `serve` a signature with a flag for each setting of the configuration tree."""
    file = typer.Option(None, "--config", help="YAML file with all settings, several models too")
    ray = typer.Option(
        None, "--address", help="deploy to this Ray cluster: host:port, or auto [default: a private one]"
    )
    board = typer.Option(False, "--ray-dashboard", help="with Ray's own dashboard, on 127.0.0.1 [default: without]")
    own = [
        _keyword("config", file, Path | None),
        _keyword("address", ray, str | None),
        _keyword("ray_dashboard", board, bool),
    ]
    parameters = [*own, *flags.setting_parameters()]
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command()(serve)


def _keyword(name: str, option: Any, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


_with_setting_flags()


def _base_url(url: str) -> str:
    """`url` without a slash at its end. Raises `SettingError` for what isn't an http(s) URL."""
    import httpx

    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise SettingError("--url", url, f"a URL such as {URL} ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.host:
        raise SettingError("--url", url, f"a URL such as {URL}")
    return url.rstrip("/")


@app.command()
def chat(
    url: UrlOption = URL,
    model: Annotated[str | None, typer.Option(help="model to talk to [default: the first one served]")] = None,
    system: Annotated[str | None, typer.Option(help="system message [default: none]")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy [default: the model's]")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="longest answer, tokens [default: what fits]")] = None,
) -> int:
    """Talk to the service. Ctrl-C stops an answer, Ctrl-D leaves."""
    from deployments.cli.chat import chat as converse

    options = {"temperature": temperature, "max_tokens": max_tokens}
    return converse(
        _base_url(url), model, system, {name: value for name, value in options.items() if value is not None}
    )


@app.command()
def status(
    url: UrlOption = URL,
    as_json: Annotated[bool, typer.Option("--json", help="the service's own JSON")] = False,
) -> int:
    """Show replicas, load and budgets."""
    from rich.console import Console as RichConsole

    from deployments.cli.status import fetch_status, show_status

    answer = asyncio.run(fetch_status(_base_url(url)))
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        show_status(answer, RichConsole())
    return 0


@app.command()
def limits(
    url: UrlOption = URL,
    model: Annotated[
        str | None, typer.Option(help="of this model [default: all; to change them, the only one]")
    ] = None,
    route: Annotated[str | None, typer.Option(help="its route, where two models have one name")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="sequences in one step")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="tokens in one step")] = None,
    long_prefill_token_threshold: Annotated[int | None, typer.Option(help="largest chunk, tokens; 0: any")] = None,
    max_num_partial_prefills: Annotated[str | None, typer.Option(help="sequences mid-prefill, or none")] = None,
    max_long_partial_prefills: Annotated[str | None, typer.Option(help="of those, long ones, or none")] = None,
    watermark: Annotated[float | None, typer.Option(help="share of KV blocks kept free when admitting")] = None,
    reset: Annotated[bool, typer.Option("--reset", help="all others back to their values at the start")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="the service's own JSON")] = False,
) -> int:
    """Show the limits of running replicas, or change them on all replicas of a model, between two steps.

    No limit can be set above its value at the start. A refused value changes nothing on any replica. Replicas that
    start later get the changes, too; a new start of the service forgets them.
    """
    from rich.console import Console as RichConsole

    from deployments.cli.limits import change_limits, client_of, fetch_limits, given_limits, show_limits

    flags_given = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "long_prefill_token_threshold": long_prefill_token_threshold,
        "max_num_partial_prefills": max_num_partial_prefills,
        "max_long_partial_prefills": max_long_partial_prefills,
        "watermark": watermark,
    }
    new = given_limits(flags_given)
    change = {"model": model, "route": route, "limits": new, "reset": reset} if new or reset else None

    async def ask() -> dict[str, Any]:
        async with client_of(_base_url(url)) as client:
            return await (change_limits(client, change) if change else fetch_limits(client, model, route))

    answer = asyncio.run(ask())
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        show_limits(answer, RichConsole())
    return EXIT_UNFINISHED if change and answer["models"][0]["silent"] else 0


@app.command()
def route(
    prompt: Annotated[str, typer.Argument(help="the request's text; - reads it from stdin")],
    url: UrlOption = URL,
    model: Annotated[str | None, typer.Option(help="model to ask [default: the first one served]")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="with all candidates, and why the first one won")] = False,
    chat_prompt: Annotated[bool, typer.Option("--chat/--completion", help="a user's message, or a raw prompt")] = True,
    max_tokens: Annotated[int | None, typer.Option(help="longest answer, tokens [default: what fits]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the service's own JSON")] = False,
) -> int:
    """Show to which replica a request would be sent now, without sending it.

    One ingress process answers, by what it knows: reports of the replicas, and of what was sent since its own requests.
    """
    from rich.console import Console as RichConsole

    from deployments.cli.limits import client_of
    from deployments.cli.route import ask_route, body_of, one_line, prompt_of, show_explanation

    base_url = _base_url(url)
    body = body_of(prompt_of(prompt), chat=chat_prompt, max_tokens=max_tokens)

    async def ask() -> dict[str, Any]:
        async with client_of(base_url) as client:
            return await ask_route(client, model, body)

    answer = asyncio.run(ask())
    if as_json:
        print(json.dumps(answer, indent=2))
    elif explain:
        show_explanation(answer, RichConsole())
    else:
        print(one_line(answer))
    return 0


@models.command()
def prepare(
    model: Annotated[str, typer.Argument(help="'embedded', a hub id, a folder or a .gguf file")] = "embedded",
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit of a hub model")] = None,
    download_dir: Annotated[str | None, typer.Option(help="folder for prepared models [the user's cache]")] = None,
) -> int:
    """Fetch and convert a model now, so that a later start is quick."""
    from deployments.cli.preparation import prepare_model

    given = {"model": model, "revision": revision, "download_dir": download_dir}
    settings = flags.serve_config(None, {name: value for name, value in given.items() if value is not None})
    console = Console()
    with TemporaryDirectory() as temporary:
        card = asyncio.run(prepare_model(settings.app.models[0], Path(temporary), console.doing))
    console.line(f"{card.name} is ready in {card.folder}")
    return 0


@dashboards.command()
def publish(
    url: Annotated[str, typer.Option(help="Grafana's URL")] = "http://127.0.0.1:3000",
    token: Annotated[str | None, typer.Option(help="service account token", envvar="GRAFANA_TOKEN")] = None,
    user: Annotated[str | None, typer.Option(help="user name, where there is no token")] = None,
    password: Annotated[str | None, typer.Option(help="the user's password", envvar="GRAFANA_PASSWORD")] = None,
    datasource_uid: Annotated[
        str | None, typer.Option(help="uid of the Prometheus data source [default: Grafana's default]")
    ] = None,
    folder: Annotated[str, typer.Option(help="folder in Grafana")] = "brimful",
) -> int:
    """Create or update the dashboards in a Grafana."""
    from dashboards.publish import publish as publish_boards

    for address in publish_boards(
        url, token, user=user, password=password, datasource_uid=datasource_uid, folder=folder
    ):
        print(address)
    return 0


def run(arguments: list[str] | None = None) -> int:
    """Run a command line (None: the process's own); returns the exit code. Every error is one line on stderr."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        result = get_command(app).main(given or ["--help"], prog_name="brimful", standalone_mode=False)
    except _UsageError as error:
        error_line(error.format_message())  # type: ignore[attr-defined]
        return EXIT_USAGE
    except BrimfulError as error:
        error_line(error.message)
        return EXIT_USAGE
    except MemoryError:
        error_line("there isn't memory enough for that; ask for less (requests, replicas, blocks, sequences)")
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return result if isinstance(result, int) else 0
