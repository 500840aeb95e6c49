"""The one configuration tree: flags, a YAML file (`serve_file.py`) and `serve deploy` all end in `AppConfig`.

    ServeConfig            a Serve config file, the format of `serve deploy`
    |- http                where Serve listens (`http_options` of the file)
    `- app: AppConfig      `applications[0].args`: what `deployments.app:build` takes
       |- models[]         ModelSettings: one model, its replicas, its route, and the settings of `replica/config.py`
       |- ingress          IngressSettings
       |- router           RouterSettings
       `- metrics_port_range, drain_timeout_s

Settings of a model are flat and named as the command line names them (with dashes there). One that isn't given is
derived: from the device (`cpu` or `cuda`), from the other limit, from the cores of the machine. Unknown names, wrong
types and values out of range raise `SettingError` with the path of the setting, its value and what is allowed.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from deployments.machine import Machine
from deployments.router_settings import RouterSettings, Settings
from replica.config import EngineConfig, ModelConfig, SchedulerConfig
from replica.errors import ErrorInfo, SettingError, error_from_info

ProxyLocation = Literal["HeadOnly", "EveryNode"]
IMPORT_PATH = "deployments.app:build"
SERVED_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,254}$"
ROUTE_PATTERN = r"^/$|^(/[A-Za-z0-9_-]+)+$"

# Sequences and tokens in a step where the operator says nothing: what each kind of device can keep full.
DEVICE_LIMITS = {"cpu": (64, 512), "cuda": (256, 8192)}


class ModelSettings(Settings):
    """One model: how often, where, and with which engine settings. None means: derived, or the engine's default."""

    model: str = Field(default="embedded", min_length=1, description="'embedded', a hub id, a folder or a .gguf file")
    served_model_name: str | None = Field(
        default=None, pattern=SERVED_NAME_PATTERN, description="name in requests [model]"
    )
    replicas: int = Field(default=1, ge=1, le=1024, description="replicas of this model")
    route: str = Field(default="/", pattern=ROUTE_PATTERN, description="prefix under which this model's /v1 lives")
    num_gpus: float | None = Field(default=None, ge=0, description="GPUs of one replica [one a shard; 0 on cpu]")
    num_cpus: float | None = Field(default=None, ge=0, description="CPUs that Ray reserves for one replica [its share]")
    tensor_parallel_size: int = Field(
        default=1, ge=1, le=64, description="GPUs of a node that one replica is split over"
    )

    revision: str | None = Field(default=None, description="branch, tag or commit of a hub model")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda when the cluster has a GPU")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(default="auto", description="auto: by device")
    max_model_len: int | None = Field(default=None, ge=1, description="longest prompt + output, tokens [the model's]")
    gpu_memory_utilization: float | None = Field(
        default=None, gt=0, le=1, description="share of GPU memory to use; cuda only"
    )
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1, description="memory of the KV cache, bytes [derived]")
    num_blocks: int | None = Field(default=None, ge=1, description="KV blocks [from memory]")
    block_size: int | None = Field(default=None, ge=1, description="slots of a KV block, tokens [by attention backend]")
    num_threads: int | None = Field(default=None, ge=1, description="threads of one replica; cpu only [its cores]")
    chat_template: str | None = Field(
        default=None, description="file with a Jinja chat template, or the template [model's]"
    )
    attention_backend: str = Field(default="auto", description="how attention is computed [the fastest that serves]")
    enforce_eager: bool | None = Field(default=None, description="no captured graphs for decodes; cuda only")
    batch_invariant: bool | None = Field(default=None, description="one kernel for all widths: slow, exact repeats")
    download_dir: str | None = Field(default=None, description="folder for prepared models [the user's cache]")

    max_num_seqs: int | None = Field(default=None, ge=1, description="sequences in one step [256 cuda, 64 cpu]")
    max_num_batched_tokens: int | None = Field(
        default=None, ge=2, description="tokens in one step [8192 cuda, 512 cpu]"
    )
    scheduler_reserve_full_isl: bool | None = Field(default=None, description="admit only when the whole input fits")
    watermark: float | None = Field(default=None, ge=0, lt=1, description="share of KV blocks kept free when admitting")
    enable_prefix_caching: bool | None = Field(default=None, description="reuse KV blocks of equal prompt prefixes")
    max_num_queued_seqs: int | None = Field(default=None, ge=1, description="bound of the waiting queue, sequences")
    max_num_queued_tokens: int | None = Field(default=None, ge=1, description="bound of the waiting queue, tokens")
    queue_timeout_s: float | None = Field(default=None, gt=0, description="longest wait in the queue, seconds")

    enable_chunked_prefill: bool | None = Field(default=None, description="cut long prompts into chunks [on]")
    long_prefill_token_threshold: int | None = Field(default=None, ge=0, description="largest chunk, tokens [0: any]")
    max_num_partial_prefills: int | None = Field(default=None, ge=1, description="sequences mid-prefill [no limit]")
    max_long_partial_prefills: int | None = Field(default=None, ge=1, description="of those, long ones [no limit]")
    max_prefill_skip_s: float | None = Field(default=None, ge=0, description="a long prompt is passed for, seconds")
    kv_bypass_s: float | None = Field(default=None, ge=0, description="who waits for blocks is passed for, seconds")
    kv_bypass_blocks: int | None = Field(default=None, ge=0, description="by requests of at most, blocks")
    policy: Literal["fcfs", "priority"] | None = Field(default=None, description="order of the queue [fcfs]")
    priority_ageing_s: float | None = Field(default=None, gt=0, description="waiting that gains a priority, seconds")
    batching: Literal["continuous", "static"] | None = Field(default=None, description="static: only to compare with")

    stall_timeout_s: float | None = Field(
        default=None, gt=0, description="no step for this long with work: dead, seconds"
    )
    lease_timeout_s: float | None = Field(
        default=None, ge=3, description="a stream nobody renews ends after, seconds; renewed every second"
    )
    max_backlog_tokens: int | None = Field(default=None, ge=1, description="a reader further behind is dropped, tokens")
    check_invariants: bool | None = Field(default=None, description="the scheduler checks itself after every step")

    @property
    def name(self) -> str:
        """What clients write in `model`."""
        return self.served_model_name or self.model

    def device_on(self, machine: Machine) -> Literal["cpu", "cuda"]:
        """The device of this model's replicas: `auto` takes a GPU when the cluster has one."""
        if self.device == "auto":
            return "cuda" if machine.has_gpu else "cpu"
        return self.device

    def check_unused(self, device: str) -> None:
        """Raises `SettingError` for a setting that would change nothing on `device` (`auto`: not known yet), or with
        this model."""
        for name, only_on in (("gpu_memory_utilization", "cuda"), ("enforce_eager", "cuda"), ("num_threads", "cpu")):
            if getattr(self, name) is not None and device not in ("auto", only_on):
                raise SettingError(name, getattr(self, name), f"only on device {only_on}, and this model's is {device}")
        if self.tensor_parallel_size > 1 and self.num_gpus not in (None, self.tensor_parallel_size):
            allowed = f"with tensor_parallel_size = {self.tensor_parallel_size} only as many, one for each shard"
            raise SettingError("num_gpus", self.num_gpus, allowed)
        path = Path(self.model).expanduser()
        on_disk = self.model.endswith(".gguf") or self.model.startswith((".", "~", "/")) or path.exists()
        if self.revision is not None and (on_disk or self.model == "embedded"):
            raise SettingError("revision", self.revision, "only for a model of the hub")

    def limits_on(self, device: str) -> tuple[int, int]:
        """(`max_num_seqs`, `max_num_batched_tokens`): a limit not given follows the device, and yields to the other."""
        seqs, tokens = DEVICE_LIMITS[device]
        if self.max_num_seqs is not None:
            seqs, tokens = self.max_num_seqs, max(tokens, self.max_num_seqs + 1)
        if self.max_num_batched_tokens is not None:
            tokens = self.max_num_batched_tokens
            seqs = self.max_num_seqs if self.max_num_seqs is not None else min(seqs, tokens - 1)
        return seqs, tokens

    def engine_config(self, machine: Machine, num_replicas_in_all: int) -> EngineConfig:
        """The engine settings of one replica, everything derived. Raises `SettingError`."""
        device = self.device_on(machine)
        seqs, tokens = self.limits_on(device)
        derived: dict[str, Any] = {"device": device, "max_num_seqs": seqs, "max_num_batched_tokens": tokens}
        if device == "cpu" and self.num_threads is None:
            derived["num_threads"] = max(1, int(machine.cpu_share(num_replicas_in_all)))
        given = self.model_dump(exclude_none=True) | derived
        return EngineConfig(
            model=ModelConfig(**_only(given, ModelConfig)),
            scheduler=SchedulerConfig(**_only(given, SchedulerConfig)),
            **_only(given, EngineConfig, but=("model", "scheduler")),
        )

    def ray_resources(self, machine: Machine, num_replicas_in_all: int) -> dict[str, float]:
        """`num_cpus` and `num_gpus` of one replica's actor. CPUs are reserved so that replicas spread over nodes.

        A replica over several GPUs is one actor that asks for all of them: Ray places an actor on one node and shows it
        just these GPUs, which its rank processes inherit. A placement group of one bundle would say the same.
        """
        on_gpu = self.device_on(machine) == "cuda"
        share = 1.0 if on_gpu else machine.cpu_share(num_replicas_in_all)
        num_cpus = self.num_cpus if self.num_cpus is not None else share
        num_gpus = self.num_gpus if self.num_gpus is not None else float(self.tensor_parallel_size if on_gpu else 0)
        return {"num_cpus": num_cpus, "num_gpus": num_gpus}


class IngressSettings(Settings):
    """The HTTP edge. Bounds hold for each ingress process."""

    num_replicas: int = Field(default=1, ge=1, le=256, description="ingress processes")
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024, description="largest request body, bytes")
    body_timeout_s: float = Field(default=30.0, gt=0, description="a body must have arrived after, seconds")
    max_in_flight: int = Field(default=2048, ge=1, description="requests one ingress process works on at once")
    max_continuations: int = Field(default=2, ge=0, le=8, description="replicas an answer may lose and still go on")
    continuation_wait_s: float = Field(default=15.0, ge=0, le=600, description="for another replica at most, seconds")
    limits_from: Literal["this-machine", "anywhere", "nowhere"] = Field(
        default="this-machine", description="clients that may POST to /limits and /route"
    )
    tokenizer_threads: int = Field(default=2, ge=1, le=64, description="threads that tokenize, beside the event loop")


class AppConfig(Settings):
    """The whole application. `metrics_port_range`: ports of the machine on which replicas and ingresses serve metrics.

    Keep it below 10000 (Ray's workers use 10002 and up). `drain_timeout_s`: how long a stopping replica lets its
    streams finish.
    """

    models: tuple[ModelSettings, ...] = Field(default=(ModelSettings(),), min_length=1, strict=False)
    ingress: IngressSettings = IngressSettings()
    router: RouterSettings = RouterSettings()
    metrics_port_range: str = Field(default="9100-9199", pattern=r"^\d{1,5}-\d{1,5}$")
    metrics_host: str = Field(default="127.0.0.1", min_length=1, description="address on which metrics are served")
    drain_timeout_s: float = Field(
        default=30.0, ge=0, description="a stopping replica lets streams finish for, seconds"
    )

    @property
    def num_model_replicas(self) -> int:
        return sum(model.replicas for model in self.models)

    @property
    def metrics_ports(self) -> range:
        low, high = (int(part) for part in self.metrics_port_range.split("-"))
        return range(low, high + 1)

    @classmethod
    def parse(cls, args: object, *, path: str = "") -> AppConfig:
        """Check `args` (a mapping as YAML or a caller gives it). `path` leads the names in errors."""
        if isinstance(args, cls):
            return args
        config = cls.checked(args, path=path)
        config._check_together(path)
        return config

    def router_weights(self, model: ModelSettings) -> dict[str, float]:
        """Weights for the replicas of one model: without a prefix cache no prefix is cached anywhere."""
        weights = self.router.weights
        return weights | {"prefix_affinity": 0.0} if model.enable_prefix_caching is False else weights

    def _check_together(self, path: str) -> None:
        ports, needed = self.metrics_ports, self.num_model_replicas + self.ingress.num_replicas
        if not 1024 <= ports.start <= ports.stop - 1 <= 9999:
            raise SettingError(f"{path}metrics_port_range", self.metrics_port_range, "LOW-HIGH within 1024-9999")
        if len(ports) < needed:
            allowed = f"at least {needed} ports: one for each replica and ingress process"
            raise SettingError(f"{path}metrics_port_range", self.metrics_port_range, allowed)
        seen: set[tuple[str, str]] = set()
        for index, model in enumerate(self.models):
            here = f"{path}models[{index}]."
            if (model.route, model.name) in seen:
                raise SettingError(f"{here}served_model_name", model.name, f"one name a model on route {model.route}")
            seen.add((model.route, model.name))
            if not any(self.router_weights(model).values()):
                allowed = "prefix_affinity is the only weight of the router that isn't 0"
                raise SettingError(f"{here}enable_prefix_caching", model.enable_prefix_caching, allowed)
            try:
                model.check_unused(model.device)
                model.engine_config(Machine(), self.num_model_replicas)
            except SettingError as error:
                raise error_from_info(ErrorInfo(error.code, here + error.message, error.param)) from None


class HttpSettings(Settings):
    """Where Serve listens: the part of Serve's `http_options` that brimful knows."""

    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=1, le=65535)


class ServeConfig(Settings):
    """A Serve config file: everything that `brimful serve --config` and `serve deploy` need."""

    http: HttpSettings = HttpSettings()
    proxy_location: ProxyLocation = "EveryNode"
    app: AppConfig = AppConfig()

    def to_serve_file(self) -> dict[str, Any]:
        """The file's content as `serve deploy` takes it; only what differs from the defaults is written."""
        application = {
            "name": "brimful",
            "route_prefix": "/",
            "import_path": IMPORT_PATH,
            "args": self.app.model_dump(mode="json", exclude_defaults=True),
        }
        http = self.http.model_dump()
        return {"http_options": http, "proxy_location": self.proxy_location, "applications": [application]}


def _only(values: dict[str, Any], kind: type[Any], but: tuple[str, ...] = ()) -> dict[str, Any]:
    return {f.name: values[f.name] for f in fields(kind) if f.name in values and f.name not in but}
