"""The loader of Serve config files, as `brimful serve --config` and `serve deploy` take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from deployments.config import AppConfig, HttpSettings, ProxyLocation, ServeConfig
from deployments.router_settings import Settings
from replica.errors import SettingError


class _ServeApplication(Settings):
    name: Literal["brimful"] = "brimful"
    route_prefix: Literal["/"] = "/"
    import_path: Literal["deployments.app:build"]
    args: dict[str, Any] = Field(default_factory=dict)


class _ServeFile(Settings):
    http_options: HttpSettings = HttpSettings()
    proxy_location: ProxyLocation = "EveryNode"
    applications: tuple[_ServeApplication] = Field(min_length=1, strict=False)


def load_serve_config(path: Path) -> ServeConfig:
    """Read a Serve config file. What `brimful serve` would not apply (runtime_env, overrides) is refused by name.

    Raises `SettingError` naming the setting's path in the file, or the file where it isn't readable as YAML.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).replace(' in "<unicode string>",', " at").split())
        raise SettingError("config", str(path), f"a readable YAML file ({reason})") from None
    if not isinstance(content, dict):
        found = "it is empty" if content is None else f"it holds {content!r:.60}"
        allowed = f"the file must be a mapping with http_options and applications; {found}"
        raise SettingError("config", str(path), allowed)
    file = _ServeFile.checked(content)
    app = AppConfig.parse(file.applications[0].args, path="applications[0].args.")
    return ServeConfig(http=file.http_options, proxy_location=file.proxy_location, app=app)
