"""Commands as they are typed."""

from collections.abc import Sequence

from kl_lens.cli.main import main

Words = str | Sequence[str]  # "--windows 2", or words that may hold spaces


def typed(*parts: Words) -> list[str]:
    words: list[str] = []
    for part in parts:
        words += part.split() if isinstance(part, str) else part
    return words


def done(*parts: Words) -> None:
    """This command ends well."""
    words = typed(*parts)
    assert main(words) == 0, words


def refused(capsys, *parts: Words, code: int = 1) -> str:
    """What this command says on standard error, and ends with this code."""
    words = typed(*parts)
    assert main(words) == code, words
    return str(capsys.readouterr().err)
