"""`heavypath serve`: an HTTP server with OpenAI's API."""

import gc
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heavypath.speculative.cli import options
from heavypath.speculative.cli.progress import progress, starting

if TYPE_CHECKING:
    from heavypath.speculative.loading import Pair

logger = logging.getLogger(__name__)
TOOL_CALLS = ("hermes", "mistral", "llama3", "qwen3_coder", "glm4", "seed_oss")  # of http.tool_calls
REASONING = ("auto", "none", "think", "mistral", "seed_oss", "kimi")  # of http.answer_forms and http.reasoning
DEMO_NAME = "heavypath-demo"
WARM_UP_TOKENS = 4
NOISE = 0  # the service's seed. With a request's seed it determines the noise, so results are equal on all servers


def serve(
    target: options.Target = None,
    draft: options.Draft = None,
    method: options.Method = None,
    tree_size: options.TreeSize = None,
    profile: options.ProfileFile = None,
    verifier: options.Verifier = None,
    device: options.Device = None,
    threads: options.Threads = None,
    dtype: options.Dtype = None,
    offline: options.Offline = False,
    host: Annotated[str, typer.Option(help="Address to listen on; by default only this machine can reach it.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests; default: --target, for a folder its last part.")
    ] = None,
    slots: options.Slots = 8,
    max_tokens: options.Room = 2048,
    queue: Annotated[int, typer.Option(min=1, help="How many texts may wait for a slot; more are refused.")] = 64,
    prefix_cache: Annotated[
        str | None,
        typer.Option(
            help="Memory, such as 500M, for caches of ended texts, which prompts with the same beginning reuse; 0 for "
            "none: requests then share nothing. Default: half of the slots' memory."
        ),
    ] = None,
    max_choices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most texts of a request: its prompts times n; default: --slots, or half of --queue if that is less.",
        ),
    ] = None,
    max_body: Annotated[int, typer.Option(min=1024, help="Most bytes of a request.")] = 1 << 20,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds that a text may take, the queue included.")] = 600,
    grace: Annotated[int, typer.Option(min=0, help="Seconds that running requests have after SIGTERM or Ctrl-C.")] = 30,
    api_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with an API key that clients must send.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Further host name that is accepted in Host headers, besides local ones; repeat it."),
    ] = None,
    template: options.Template = None,
    tool_calls: Annotated[
        str | None,
        typer.Option(
            help=f"Format of the model's tool calls: {', '.join(TOOL_CALLS)}. Default: as in its chat template."
        ),
    ] = None,
    reasoning: Annotated[
        str,
        typer.Option(
            help=f"Format of the model's thinking, which is separated from answers: {', '.join(REASONING)}. auto: as "
            "in its chat template; none leaves it in the text."
        ),
    ] = "auto",
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may send requests, such as https://example.org, or *; repeat it."),
    ] = None,
    per_request_metrics: Annotated[
        bool, typer.Option("--per-request-metrics", help="Report acceptance of drafts in each answer, as vLLM does.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seed for the requests without a seed, in the order in which they arrive. Default: a random "
            "number, printed at the start. A request's seed selects the same random numbers on every server.",
        ),
    ] = None,
    verbose: options.Verbose = False,
) -> None:
    """Serve a model over HTTP, with OpenAI's API, until SIGTERM or Ctrl-C."""
    options.check_method(method, verifier)
    check_can_serve()
    own_template = None if template is None else options.read_template(template)
    options.check_word("--tool-calls", tool_calls, TOOL_CALLS)
    options.check_word("--reasoning", reasoning, REASONING)
    with starting():
        from heavypath.speculative.cli.support import choose, load
        from heavypath.speculative.decoder import SpeculativeDecoder
        from heavypath.speculative.http.app import create_app, fingerprint_of
        from heavypath.speculative.http.connections import raise_limit_of_files
        from heavypath.speculative.http.guard import LOCAL, host_of
        from heavypath.speculative.http.metrics import Metrics
        from heavypath.speculative.http.served import Limits, Served
        from heavypath.speculative.http.server import Server, bound_socket, is_loopback
        from heavypath.speculative.http.tool_calls import FORMATS
        from heavypath.speculative.profile import Profile
        from heavypath.speculative.streaming.memory import bytes_of

    api_key = None if api_key_env is None else _key(api_key_env)
    if profile is not None and tree_size is not None:
        raise ValueError("a profile chooses the trees; leave out --tree-size or --profile")
    measured = None if profile is None else Profile.load(profile)
    prefix_bytes = None if prefix_cache is None else 0 if prefix_cache == "0" else bytes_of(prefix_cache)
    share = min(slots, max(1, queue // 2))
    if max_choices is not None and max_choices > share:
        most = "--slots, and half of --queue, the most that one client may have waiting"
        raise ValueError(f"--max-choices must be at most {most}, here {share}; got {max_choices}")
    hosts = None
    if allowed_host or (is_loopback(host) and api_key is None):
        hosts = {*LOCAL, host.lower(), *map(host_of, allowed_host or [])}
    method, draft = choose(method, target, draft, verifier, default="ersd", offline=offline)
    raise_limit_of_files()
    limits = Limits(max_tokens, choices=max_choices or share, body_bytes=max_body, seconds=timeout)
    with bound_socket(host, port) as bound:  # so that a taken address is reported before models are loaded
        if not is_loopback(host):
            keyed = "with its key" if api_key else "without a key: give --api-key-env"
            logger.warning("other machines reach this server on %s, %s; it does not encrypt", host, keyed)
        pair = load(target, draft, dtype, device=device, threads=threads, offline=offline)
        if own_template is not None:
            pair.tokenizer.chat_template = own_template
        decoder = SpeculativeDecoder(
            pair.target, pair.draft, method, tree_size=tree_size, profile=measured, verifier=verifier
        )
        service = decoder.serve(
            slots=slots, max_tokens=max_tokens, queue=queue, prefix_bytes=prefix_bytes, seed=NOISE, unseeded=seed
        )
        limits = replace(limits, max_tokens=service.limits.max_tokens)  # the models' positions may lower it
        try:
            served = Served(
                service=service,
                tokenizer=pair.tokenizer,
                name=name or name_of(target),
                temperature=default_temperature(pair),
                eos_token_ids=pair.eos_token_ids,
                limits=limits,
                metrics=Metrics(service),
                tool_format=None if tool_calls is None else FORMATS[tool_calls],
                reasoning=reasoning,
                measured=per_request_metrics,
            )
            with progress("warming up"):  # raises errors for settings of the model that cannot be served
                service.submit([1], min(WARM_UP_TOKENS, limits.max_tokens - 1), seed=0).result()
            app = create_app(served, fingerprint_of(method, NOISE), api_key, hosts, cors_origin or ())
            address, number = bound.getsockname()[:2]
            where = f"http://{f'[{address}]' if ':' in address else address}:{number}/v1"
            ready = f"heavypath: serving {served.name} by {method} at {where}, --seed {service.unseeded}"
            gc.freeze()  # garbage collection then skips the models: it takes 0.02 s, not 0.5 s
            Server(app, grace=grace, ready=lambda: typer.echo(ready, err=True)).serve_until_stopped(bound)
        finally:
            gc.unfreeze()
            service.close(graceful=False)
    typer.echo("heavypath: stopped", err=True)


def check_can_serve() -> None:
    """Raise ImportError, with what to install, if the server's packages are missing."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ImportError(f"a server needs more packages: `pip install '.[serve]'` in a checkout ({error})") from None


def _key(variable: str) -> str:
    key = os.environ.get(variable, "")
    if not key or not key.isascii() or key != key.strip():
        what = "is empty or not there" if not key else "has characters that a header cannot have"
        raise ValueError(f"--api-key-env: expected a key in the environment variable {variable!r}, which {what}")
    return key


def name_of(target: str | None) -> str:
    """Return the default of the model's name in requests: the target's name, or its folder's."""
    if target is None:
        return DEMO_NAME
    path = Path(target).expanduser()
    return path.resolve().name if path.is_dir() else path.stem if path.is_file() else target


def default_temperature(pair: "Pair") -> float:
    """Return the temperature for requests without one: that of the model's generation_config if it samples, else 1."""
    config = pair.target.generation_config
    own = config.temperature if config is not None and config.do_sample else None
    return 1.0 if own is None else own
