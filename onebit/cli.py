"""The `onebit` command."""

import sys


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
        from onebit.commands import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("onebit", "torch"):
            raise
        print(f"error: the command line needs {error.name}: pip install 'onebit[train]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    app(prog_name="onebit", args=expand_text(sys.argv[1:]))


def expand_text(arguments: list[str]) -> list[str]:
    """Let `--text` take several values: `--text a b` becomes `--text a --text b`."""
    expanded: list[str] = []
    in_text = False
    for argument in arguments:
        if argument.startswith("-"):
            in_text = argument == "--text"
        elif in_text and expanded[-1] != "--text":
            expanded.append("--text")
        expanded.append(argument)
    return expanded


if __name__ == "__main__":
    main()
