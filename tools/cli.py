"""The command `draftmill`: loads commands when they are called and turns errors into exit codes.

Commands live in modules of their own, so that `--help` and `status` start without torch.
"""

from __future__ import annotations

import importlib
import io
import sys
import traceback
from collections.abc import Sequence

import click

from draftmill.builder.requests.api_key import redacted
from draftmill.manifests.errors import BudgetError, DraftmillError, UsageError
from draftmill.manifests.files import DISK_FULL
from draftmill.tools.terminal import echo, tell_warnings

# command → module of tools that defines it, in the order of the work
COMMANDS = {
    "demo": "demo.command",
    "init": "init",
    "config": "config",
    "add": "add",
    "estimate": "estimate.command",
    "serve": "serve",
    "generate": "stages",
    "extract": "stages",
    "build": "stages",
    "retry": "maintain",
    "status": "status.command",
    "report": "report.command",
    "sql": "status.command",
    "verify": "maintain",
    "evict": "maintain",
    "vocab": "train",
    "train": "train",
    "convert": "convert",
    "speculators-train": "speculators_train",
    "eval": "evaluate",
    "export": "exchange",
    "import": "exchange",
    "doctor": "doctor.command",
    "bench": "bench.command",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"draftmill.tools.{COMMANDS[cmd_name]}")
        tell_warnings()
        attribute = {"eval": "evaluate"}.get(cmd_name, cmd_name.replace("-", "_"))
        command: click.Command = getattr(module, f"{attribute}_command")
        return command


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    import importlib.metadata  # a tenth of a second that no other command needs

    try:
        version = importlib.metadata.version("draftmill")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown (not installed)"
    echo(f"draftmill, version {version}")
    ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.option("--debug", is_flag=True, help="Show a traceback when something goes wrong.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Turn prompts and a served model into training data for a draft model, and train it.

    \b
    The way of the work:
      draftmill init DATASET --target MODEL     settings of a new dataset
      draftmill add DATASET prompts.jsonl       prompts in
      draftmill build DATASET --serve           completions and hidden states
      draftmill train DATASET --output DRAFT    a draft model that vLLM serves
      draftmill eval DRAFT --target MODEL --prompts held_out.jsonl

    Every command can be stopped at any moment and started again: it goes on where it was.
    """
    ctx.obj = {"debug": debug}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with a documented exit code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """The exit code of one command; errors have been told. KeyboardInterrupt is the caller's."""
    debug = "--debug" in arguments
    try:
        result = cli.main(args=list(arguments), prog_name="draftmill", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        told = io.StringIO()
        error.show(file=told)
        echo(told.getvalue().rstrip("\n"), err=True)
        return error.exit_code
    except click.Abort as error:
        raise KeyboardInterrupt from error
    except BrokenPipeError:
        return 1
    except DraftmillError as error:
        _trace(debug)
        echo(f"draftmill: {error}", err=True)
        return error.exit_code
    except OSError as error:
        _trace(debug)
        if error.filename is None:  # not about a place of the person's
            return _unexpected(error)
        echo(f"draftmill: {error.filename}: {error.strerror}", err=True)
        return BudgetError.exit_code if error.errno in DISK_FULL else 1
    except Exception as error:
        if str(error) == "Query interrupted":  # what DuckDB makes of a KeyboardInterrupt
            raise KeyboardInterrupt from error
        _trace(debug)
        if (bad := next((each for each in arguments if not _is_text(each)), None)) is not None:
            echo(f"draftmill: {bad!r} is not UTF-8 text", err=True)
            return UsageError.exit_code
        return _unexpected(error)


def _is_text(argument: str) -> bool:
    """False for bytes of a file name or option that are no UTF-8, which Python keeps as halves."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _unexpected(error: Exception) -> int:
    echo(
        f"draftmill: unexpected {type(error).__name__}: {redacted(str(error))}\n"
        "This is a fault in draftmill; run again with `draftmill --debug …` for a traceback.",
        err=True,
    )
    return 1


def _trace(debug: bool) -> None:
    if debug:
        # Libraries put whole replies into their exceptions, and servers quote keys in replies.
        echo(redacted(traceback.format_exc()), err=True)


if __name__ == "__main__":
    main()
