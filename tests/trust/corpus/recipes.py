"""Recipe files and overrides that cannot be meant."""

from __future__ import annotations

from pathlib import Path

from tests.trust.corpus.case import Case, Make

FILE = "r.yaml"
BASE = "base: paper\n"


def case(name: str, code: str, text: str | bytes, *overrides: str, says: str = FILE) -> Case:
    raw = text if isinstance(text, bytes) else text.encode()
    return Case(
        name=f"recipe/{name}",
        code=code,
        arguments=["recipes", "validate", FILE, *overrides],
        make=lambda folder: (folder / FILE).write_bytes(raw),
        says=says if code else "",
    )


def made(name: str, code: str, make: Make, *, says: str = FILE) -> Case:
    return Case(
        name=f"recipe/{name}",
        code=code,
        arguments=["recipes", "validate", FILE],
        make=make,
        says=says,
    )


def circle(folder: Path) -> None:
    (folder / FILE).write_text("base: other.yaml\n")
    (folder / "other.yaml").write_text(f"base: {FILE}\n")


def chain(folder: Path) -> None:
    for index in range(12):
        name = FILE if index == 0 else f"r{index}.yaml"
        (folder / name).write_text(f"base: r{index + 1}.yaml\n")


LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
TAGS = {
    "python-object": "!!python/object/apply:os.system ['touch pwned']",
    "python-name": "!!python/name:os.system",
    "python-module": "!!python/module:os",
    "binary": "!!binary aGVsbG8=",
    "custom": "!thing 1",
}
SYNTAX: dict[str, str | bytes] = {
    "empty": b"",
    "list": "- a\n- b\n",
    "scalar": "42\n",
    "tab": "train:\n\tsteps: 3\n",
    "unclosed": "train: {steps: 3\n",
    "two-documents": BASE + "---\n" + BASE,
    "not-utf-8": b"name: \xff\xfe\n",
    "utf-16": "base: paper\n".encode("utf-16"),
    "null-byte": b"name: a\0b\n",
    "escape": b"name: \x1b[2J\n",
    "binary": bytes(range(256)),
    "repeated-key": BASE + "seed: 1\nseed: 2\n",
    "number-key": BASE + "1: 2\n",
    "list-key": BASE + "? [a]\n: 2\n",
    "anchor": BASE + "name: &a x\n",
    "alias": BASE + "name: *a\n",
    "laughs": LAUGHS,
    "merge-key": BASE + "train:\n  <<: *x\n",
    "deep-list": BASE + "name: " + "[" * 5000 + "]" * 5000,
    "deep-map": BASE + "name: " + "{a: " * 2000 + "}" * 2000,
    "large": BASE + "# " + "x" * (300 << 10),
    "directive": "%YAML 9.9\n---\nbase: paper\n",
    "long-number": BASE + "seed: " + "9" * 9999,
}
VALUES = {
    "steps-zero": ("RECIPE_VALUE", "train.steps=0"),
    "steps-negative": ("RECIPE_VALUE", "train.steps=-5"),
    "steps-float": ("RECIPE_TYPE", "train.steps=1.5"),
    "steps-text": ("RECIPE_TYPE", "train.steps=many"),
    "steps-null": ("RECIPE_TYPE", "train.steps=null"),
    "steps-bool": ("RECIPE_TYPE", "train.steps=true"),
    "steps-list": ("RECIPE_TYPE", "train.steps=[1]"),
    "batch-zero": ("RECIPE_VALUE", "loader.batch_size=0"),
    "context-zero": ("RECIPE_VALUE", "loader.context_length=0"),
    "rate-nan": ("RECIPE_VALUE", "optimizer.learning_rate=.nan"),
    "rate-inf": ("RECIPE_VALUE", "optimizer.learning_rate=.inf"),
    "rate-negative": ("RECIPE_VALUE", "optimizer.learning_rate=-1e-4"),
    "hidden-zero": ("RECIPE_VALUE", "model.hidden_size=0"),
    "strategy": ("SELECTION_UNKNOWN", "selection.strategy=magic"),
    "section-a-number": ("RECIPE_TYPE", "train=3"),
    "section-null": ("RECIPE_TYPE", "train=null"),
    "unknown": ("RECIPE_UNKNOWN_KEY", "train.stepz=3"),
    "unknown-section": ("RECIPE_UNKNOWN_KEY", "trian.steps=3"),
    "below-a-leaf": ("RECIPE_TYPE", "train.steps.x=3"),
    "no-equals": ("RECIPE_OVERRIDE", "train.steps"),
    "no-key": ("RECIPE_OVERRIDE", "=3"),
    "empty-part": ("RECIPE_OVERRIDE", "train..steps=3"),
    "tag": ("RECIPE_SYNTAX", "train.steps=!!python/name:os.system x"),
    "unclosed": ("RECIPE_SYNTAX", "train.steps=[1"),
}

CASES: tuple[Case, ...] = (
    case("good", "", BASE),
    *(case(name, "RECIPE_SYNTAX", text) for name, text in SYNTAX.items()),
    *(case(f"tag-{name}", "RECIPE_SYNTAX", BASE + f"name: {t}\n") for name, t in TAGS.items()),
    *(
        case(f"override-{name}", code, BASE, override, says=override.partition("=")[0][:5])
        for name, (code, override) in VALUES.items()
    ),
    case("unknown-key", "RECIPE_UNKNOWN_KEY", BASE + "colour: blue\n"),
    case("base-missing", "RECIPE_NOT_FOUND", "base: nope\n"),
    case("base-a-number", "RECIPE_TYPE", "base: 7\n"),
    case("base-passwd", "RECIPE_SYNTAX", "base: /etc/passwd\n", says="/etc/passwd"),
    case("base-itself", "RECIPE_BASE", f"base: ./{FILE}\n"),
    made("base-circle", "RECIPE_BASE", circle),
    made("base-chain", "RECIPE_BASE", chain),
    made("missing", "RECIPE_NOT_FOUND", lambda folder: None),
    made("directory", "RECIPE_NOT_FOUND", lambda folder: (folder / FILE).mkdir()),
    made("device", "RECIPE_NOT_FOUND", lambda folder: (folder / FILE).symlink_to("/dev/zero")),
    made("dangling", "RECIPE_NOT_FOUND", lambda folder: (folder / FILE).symlink_to("nowhere")),
)
