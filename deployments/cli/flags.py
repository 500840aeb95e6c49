"""The flags of `brimful serve`, made from the configuration tree: a new setting is a flag without another line here.

A flag that isn't given leaves its setting alone, so that the defaults live in `deployments/config.py` only, and the
help shows them from there. Values are checked there too; an error is put in the words of the command line.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from pydantic.fields import FieldInfo

from deployments.config import AppConfig, HttpSettings, ModelSettings, ServeConfig
from deployments.serve_file import load_serve_config
from replica.config import EngineConfig, ModelConfig, SchedulerConfig
from replica.errors import BrimfulError, ErrorInfo, SettingError, error_from_info

SERVICE_HELP = {
    "host": "address to listen on; 127.0.0.1 is this machine only",
    "port": "port of the HTTP API",
    "metrics_port_range": "ports for the metrics of replicas and ingresses, within 1024-9999",
}
APP_FLAGS = ("metrics_port_range", "metrics_host", "drain_timeout_s")


def setting_parameters() -> list[inspect.Parameter]:
    """One keyword parameter with a typer option for each setting that `brimful serve` takes as a flag."""
    parameters = [_parameter(name, field) for name, field in ModelSettings.model_fields.items()]
    for name, field in HttpSettings.model_fields.items():
        parameters.append(_parameter(name, field))
    return parameters + [_parameter(name, AppConfig.model_fields[name]) for name in APP_FLAGS]


def serve_config(file: Path | None, given: Mapping[str, Any]) -> ServeConfig:
    """The settings of `file` (or the defaults) with the flags `given` put over them. Raises `SettingError`.

    Flags of a model go to the only model; a file with several models must hold such settings itself.
    """
    base = load_serve_config(file) if file else ServeConfig()
    of_model = {name: value for name, value in given.items() if name in ModelSettings.model_fields}
    of_http = {name: value for name, value in given.items() if name in HttpSettings.model_fields}
    of_app = {name: value for name, value in given.items() if name in APP_FLAGS}
    if of_model and len(base.app.models) > 1:
        flag = flag_of(next(iter(of_model)))
        raise SettingError(flag, next(iter(of_model.values())), f"{file} holds several models: set it there")
    app = base.app.model_dump(exclude_unset=True)
    if of_model:
        app["models"] = [base.app.models[0].model_dump(exclude_unset=True) | _absolute(of_model)]
    try:
        return ServeConfig(
            proxy_location=base.proxy_location,
            http=HttpSettings.checked(base.http.model_dump() | of_http),
            app=AppConfig.parse(app | of_app),
        )
    except SettingError as error:
        raise in_flag_terms(error, given) from None


def _absolute(of_model: dict[str, Any]) -> dict[str, Any]:
    """Files named on the command line, as every process of the cluster finds them."""
    found = {}
    for name in ("model", "chat_template", "download_dir"):
        if (value := of_model.get(name)) and (name == "download_dir" or Path(value).exists()):
            found[name] = str(Path(value).expanduser().absolute())
    return of_model | found


def in_flag_terms(error: SettingError, given: Mapping[str, Any]) -> BrimfulError:
    """models[0].max_model_len -> --max-model-len, when it was given as a flag."""
    name = (error.param or "").removeprefix("models[0].")
    if name not in given:
        return error
    message = error.message.removeprefix("models[0].").replace(name, flag_of(name), 1)
    return error_from_info(ErrorInfo(error.code, message, flag_of(name)))


def flag_of(name: str) -> str:
    """max_num_seqs -> --max-num-seqs."""
    return "--" + name.replace("_", "-")


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    kind, choices = _kind_of(field.annotation)
    shown = SERVICE_HELP.get(name) or field.description or ""
    if len(choices) > 1:
        shown += f" ({', '.join(choices)})"
    default = field.default if field.default is not None else _engine_default(name)
    if default is not None and "[" not in shown:
        shown += f" [default: {default}]"
    flag = f"{flag_of(name)}/--no-{name.replace('_', '-')}" if kind is bool else flag_of(name)
    option = typer.Option(None, flag, help=shown, show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


def _engine_default(name: str) -> Any:
    """What the engine takes where neither a flag nor the device decides."""
    for config in (ModelConfig, SchedulerConfig, EngineConfig):
        for setting in dataclasses.fields(config):
            if setting.name == name and setting.default is not dataclasses.MISSING:
                return setting.default
    return None


def _kind_of(annotation: Any) -> tuple[Any, tuple[str, ...]]:
    """(type for the command line, choices): `int | None` -> int, a Literal -> the type of its values."""
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in annotation.__args__ if kind is not types.NoneType)
    if typing.get_origin(annotation) is typing.Literal:
        values = typing.get_args(annotation)
        return type(values[0]), tuple(str(value) for value in values)
    return annotation, ()
