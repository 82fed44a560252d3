"""The command line: one command per job, every setting an option of ``serve``."""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic_core import PydanticUndefined

import proxy
from proxy.errors import LastwordError
from proxy.settings import Settings, load_settings, unknown_variables

__all__ = ["app", "main"]

app = typer.Typer(
    name="lastword",
    help="A reverse proxy that makes every vLLM Responses stream end with the event"
    " that its status asks for.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; an error of ours is a sentence on stderr and exit status 2."""
    try:
        _refuse_namesake()
        app()
    except LastwordError as error:
        typer.echo(f"lastword: {error}", err=True)
        sys.exit(2)


def _refuse_namesake() -> None:
    """Refuse to run beside proxy.py, whose package has the same name as ours."""
    try:
        importlib.metadata.distribution("proxy.py")
    except importlib.metadata.PackageNotFoundError:
        return
    raise LastwordError(
        "the distribution proxy.py is installed here too, and both bring a package named"
        " 'proxy'. Install Lastword in an environment of its own."
    )


def _show_version(value: bool) -> None:  # noqa: FBT001 - typer calls it with the option's value
    if value:
        typer.echo(f"lastword {proxy.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    *,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def _serve(*, check_config: bool = False, **given: Any) -> None:
    """Serve: correct the streams of the vLLM at --upstream.

    Every option is also an environment variable, LASTWORD_ and its name: LASTWORD_UPSTREAM.
    """
    # Imported here: the other commands need no server.
    from proxy.gateway.server import serve  # noqa: PLC0415
    from proxy.operations.logs import configure_logs  # noqa: PLC0415

    settings = load_settings(**{name: value for name, value in given.items() if value is not None})
    if check_config:
        for name in unknown_variables(os.environ):
            typer.echo(f"{name} is no setting, and has no effect.", err=True)
        typer.echo("The settings are fine.")
        return
    configure_logs(settings.log_format, settings.log_level)
    _runner()(serve(settings))


def _runner() -> Any:
    """Return what runs the server: on uvloop where there is one."""
    try:
        import uvloop  # noqa: PLC0415 - not on Windows
    except ImportError:
        return asyncio.run
    return uvloop.run


def _option_type(annotation: Any) -> Any:
    """Return the type that typer can parse; pydantic does the checking."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation if annotation in (int, float) else str


def _metavar(name: str, annotation: Any) -> str:
    """Say what a value looks like: URL, the choices, or the kind of number."""
    if name == "upstream":
        return "URL"
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return "|".join(annotation)
    return {bool: "true|false", int: "INTEGER", float: "NUMBER"}.get(annotation, "TEXT")


def _options() -> list[inspect.Parameter]:
    """Make one option per setting; unset ones are left to the environment and the default."""
    parameters = []
    for name, field in Settings.model_fields.items():
        default = field.default
        shown = default.value if hasattr(default, "value") else default
        if isinstance(shown, bool):
            shown = str(shown).lower()
        required = default is PydanticUndefined
        option = typer.Option(
            f"--{name.replace('_', '-')}",
            help=f"{field.description}"
            + (
                " [required]"
                if required
                else f" [default: {'none' if shown in (None, '') else shown}]"
            ),
            show_default=False,
            metavar=_metavar(name, field.annotation),
        )
        kind = _option_type(field.annotation) | None
        parameters.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[kind, option],
            )
        )
    check = typer.Option("--check-config", help="Check the settings and exit.")
    parameters.append(
        inspect.Parameter(
            "check_config",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, check],
        )
    )
    return parameters


_serve.__signature__ = inspect.Signature(_options())  # type: ignore[attr-defined]
_serve.__annotations__ = {parameter.name: parameter.annotation for parameter in _options()}
app.command("serve")(_serve)


@app.command("drain")
def _drain(
    *,
    admin: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The admin port of the running proxy."
            " [default: as LASTWORD_ADMIN_HOST and LASTWORD_ADMIN_PORT say]",
        ),
    ] = None,
) -> None:
    """Ask a running proxy to take no new requests, and wait until none runs.

    Made for a preStop hook. Exit status 1 if requests still ran when the proxy's grace was over.
    """
    from proxy.tools.drain import drain, find_admin_url  # noqa: PLC0415

    if running := drain(admin or find_admin_url()):
        typer.echo(f"lastword: {running} requests are still running", err=True)
        raise typer.Exit(1)
    typer.echo("drained")


@app.command("fix")
def _fix(
    file: Annotated[
        Path | None,
        typer.Argument(help="A recorded stream, with or without its HTTP head; default stdin."),
    ] = None,
) -> None:
    """Apply the terminal rule to a recorded stream: FILE or stdin to stdout.

    Says on stderr what it changed. It invents, completes and removes nothing.
    """
    from proxy.tools.fix import fix_stream  # noqa: PLC0415

    try:
        data = file.read_bytes() if file is not None else sys.stdin.buffer.read()
    except OSError as error:
        raise LastwordError(f"{file} cannot be read: {error.strerror}") from error
    fixed, changes = fix_stream(data)
    sys.stdout.buffer.write(fixed)
    sys.stdout.buffer.flush()
    for change in changes or ["nothing to correct"]:
        typer.echo(change, err=True)


@app.command("demo")
def _demo(
    *,
    vllm: Annotated[
        bool, typer.Option("--vllm", help="Use a real vLLM on the CPU, if one is installed.")
    ] = False,
) -> None:
    """Show a truncated stream straight from vLLM and through Lastword, side by side.

    Exit status 0 only if the stream was corrected and every other byte was equal.
    """
    from proxy.tools.demo import run_demo  # noqa: PLC0415

    if not _runner()(run_demo(vllm=vllm)):
        raise typer.Exit(1)


@app.command("check")
def _check(
    url: Annotated[str, typer.Argument(help="The vLLM's address.", metavar="URL")],
    *,
    through: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Ask a proxy in front of it too; its answers decide."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model to ask for. [default: the first that is listed]")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=["VLLM_API_KEY", "OPENAI_API_KEY"], help="The key; it is never shown."),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="'NAME: VALUE'", help="A further header; may be repeated."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(min=1, max=3600, help="How long all questions to one address may take.")
    ] = 60.0,
    ca_file: Annotated[
        Path | None, typer.Option(help="PEM file of the authorities to verify https with.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON for machines.")] = False,
) -> None:
    """Ask a vLLM real questions, and show what it gets wrong and what Lastword makes of it.

    It takes some seconds and a few hundred tokens (3,200 at most), and cancels and deletes what it
    began. Exit status 0: nothing to correct; 1: faults that Lastword corrects; 2: the server cannot
    be asked; 3: no such fault was seen, but a question could not be asked.
    """
    from proxy.tools.check.command import run_check  # noqa: PLC0415
    from proxy.tools.check.options import make_options  # noqa: PLC0415

    options = make_options(
        url,
        through,
        model=model,
        api_key=api_key,
        headers=header or [],
        ca_file=ca_file,
        timeout_s=timeout_s,
    )
    raise typer.Exit(_runner()(run_check(options, as_json=as_json)))
