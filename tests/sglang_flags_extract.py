"""Write down which flags a release of SGLang knows, without installing or importing it.

    pip download sglang==0.5.17 --no-deps -d wheels
    python tests/sglang_flags_extract.py wheels/sglang-*.whl > tests/data/sglang_flags.json

It reads the sources in the wheels: calls of `add_argument("--flag")` (all of 0.5.9, part of the
later ones), and the annotated fields from which newer releases make their flags (`A[type, ...]`;
the name of the field, or `Arg(cli_name=..., aliases=[...])`).
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator

PLACES = re.compile(r"sglang/srt/(server_args\.py|arg_groups/.*\.py)")


def flags_of(source: str) -> Iterator[str]:
    """Yield every flag that this source defines, without the dashes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            yield from (flag for flag in texts(node.args) if flag.startswith("--"))
        elif (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.annotation, ast.Subscript)
            and getattr(node.annotation.value, "id", "") == "A"
            and isinstance(node.target, ast.Name)
        ):
            yield from of_field(node.target.id, node.annotation.slice)


def of_field(name: str, annotation: ast.expr) -> Iterator[str]:
    """Yield the flags of one annotated field; none if it says that it has none."""
    made = [
        {word.arg: word.value for word in call.keywords}
        for call in ast.walk(annotation)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Arg"
    ]
    words = made[0] if made else {}
    hidden = words.get("no_cli")
    if isinstance(hidden, ast.Constant) and hidden.value is True:
        return
    own = texts([words["cli_name"]]) if "cli_name" in words else []
    yield from own or ["--" + name.replace("_", "-")]
    aliases = words.get("aliases")
    if isinstance(aliases, ast.List):
        yield from texts(aliases.elts)


def texts(nodes: list[ast.expr]) -> list[str]:
    """Return the string constants among these expressions."""
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def main() -> None:
    """Print one JSON object: the version of each wheel, and its flags in order."""
    found = {}
    for path in sys.argv[1:]:
        with zipfile.ZipFile(path) as wheel:
            sources = [wheel.read(name) for name in wheel.namelist() if PLACES.fullmatch(name)]
        flags = {flag for source in sources for flag in flags_of(source.decode("utf-8"))}
        found[re.split("-", path.rsplit("/", 1)[-1])[1]] = sorted(
            f.removeprefix("--") for f in flags
        )
    lines = [f"{json.dumps(version)}: {json.dumps(flags)}" for version, flags in found.items()]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
