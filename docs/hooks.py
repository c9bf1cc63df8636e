"""Pages that MkDocs makes of the program itself: commands, options of a recipe, public names."""

from __future__ import annotations

import ast
import inspect
import json
from importlib import import_module
from itertools import pairwise
from typing import Any, get_args, get_origin

import typer
from mkdocs.structure.files import File, Files

import gear_offline
from gear_offline.cli.main import app
from gear_offline.config.recipe import Recipe
from gear_offline.config.sections import OwnModelSettings


def on_files(files: Files, *, config: Any) -> Files:
    """Add the generated pages."""
    pages = {"cli": commands_page(), "recipe": recipe_page(), "python": python_page()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


# Browsers start no worker from a file, and the theme would load a stand-in from the network.
SEARCH_FROM_FILES = """<script>
if (location.protocol === "file:")
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      this.inner = new Promise(done => frame.onload = () => {
        const script = frame.contentDocument.createElement("script")
        frame.contentWindow.postMessage = data =>
          this.dispatchEvent(new MessageEvent("message", {data}))
        script.onload = () => done(frame.contentWindow)
        script.src = url
        frame.contentDocument.body.append(script)
      })
      frame.hidden = true
      document.body.append(frame)
    }
    postMessage(data) {
      this.inner.then(inner => inner.dispatchEvent(new MessageEvent("message", {data})))
    }
  }
</script>"""


def on_post_page(output: str, **_: Any) -> str:
    """Let the search of pages that are opened as files work without a network."""
    stand_in = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
    return output.replace(stand_in, SEARCH_FROM_FILES)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> None:
    """Have the search show how something is done before where it is listed."""
    is_own = "/own-" in page.url or "reference/strategies" in page.url
    kind = "own" if is_own else page.url.partition("/")[0]
    page.meta["search"] = {"boost": {"own": 4, "how-to": 2, "tutorials": 2}.get(kind, 0.5)}


def commands_page() -> str:
    """Return the help of every command."""
    lines = ["# Commands", ""]

    def add(command: Any, path: str) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            if not inner.hidden:
                add(inner, f"{path} {name}")
        if hasattr(command, "commands"):
            return
        lines.extend([f"## {path}", "", command.help, ""])
        examples = (command.epilog or "").replace("  ", "").splitlines()[1:]
        lines.extend(["```sh", *examples, "```", ""] if examples else [])
        lines.extend(["| option | default | meaning |", "|---|---|---|"])
        for parameter in command.params:
            is_option = parameter.param_type_name == "option"
            words = [*parameter.opts, *parameter.secondary_opts]
            names = ", ".join(words) if is_option else parameter.name.upper()
            value = f" {parameter.metavar}" if is_option and parameter.metavar else ""
            default = f"`{parameter.default}`" if parameter.default else ""
            meaning = " ".join((parameter.help or "").split())
            lines.append(f"| `{names}{value}` | {default} | {meaning} |")
        lines.append("")

    add(typer.main.get_command(app), "gear-offline")
    return "\n".join(lines)


def recipe_page() -> str:
    """Return the options of every section, with default and meaning."""
    lines = [
        "# Recipe options",
        "",
        "A recipe is one YAML file. `base:` names another recipe whose values it changes; what no",
        "recipe says has the default below. On the command line: `section.option=value`.",
        "",
    ]

    described = {OwnModelSettings}

    def add(model: Any, title: str) -> None:
        rows, inner = [], []
        described.add(model)
        schema = model.model_json_schema()
        for name, field in model.model_fields.items():
            path = f"{title}.{name}".lstrip(".")
            sections, place = sections_in(field.annotation)
            for section in (kind for kind in sections if kind not in described):
                of = f", kind {section().kind}" if name == "model" else ""
                inner.append((section, f"{path}{place}{of}"))
            if (sections and not place) or not field.repr:
                continue
            default = "required" if field.is_required() else f"`{json.dumps(field.get_default())}`"
            values, meaning = accepted(schema["properties"][name]), field.description or ""
            rows.append(f"| `{name}` | {values} | {default} | {' '.join(meaning.split())} |")
        if rows:
            lines.extend([f"## {title}" if title else "## The recipe itself", ""])
            lines.extend(
                ["| option | values | default | meaning |", "|---|---|---|---|", *rows, ""]
            )
        for section, path in inner:
            add(section, path)

    add(Recipe, "")
    return "\n".join(lines)


def sections_in(annotation: Any) -> tuple[list[Any], str]:
    """Return the sections in an annotation, and where they are: of a mapping by name, in a list."""
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation], ""
    origin, parts = get_origin(annotation), get_args(annotation)
    inner = [sections_in(part) for part in parts]
    place = {dict: ".NAME", tuple: "[]", list: "[]"}.get(origin, "")
    return [s for found, _ in inner for s in found], place + "".join(under for _, under in inner)


def accepted(schema: Any) -> str:
    """Return the values that a JSON schema takes: types, choices, ranges."""
    words = []
    for each in schema.get("anyOf", schema.get("oneOf", [schema])):
        if "enum" in each or "const" in each:
            values = each.get("enum", [each.get("const")])
            words += [f"`{v if isinstance(v, str) else json.dumps(v)}`" for v in values]
            continue
        kind = TYPES.get(each.get("type"), "sections")
        if "cuda" in each.get("pattern", ""):
            kind = "`auto`; `cpu`; `cuda`; `cuda:N`"
        if kind == "list":
            items = each.get("prefixItems", [each.get("items", {})])
            count = f"{len(items)} x " if "prefixItems" in each else "list of "
            kind = count + accepted(items[0])
        ends = [(sign, each[key]) for key, sign in SIGNS.items() if key in each]
        kind += " " + ", ".join(f"{sign} {end:g}" for sign, end in ends if abs(end) < 1e9)
        words.append(kind.strip())
    return "; ".join(dict.fromkeys(words))


SIGNS = {"minimum": ">=", "ge": ">=", "exclusiveMinimum": ">", "gt": ">"}
SIGNS |= {"maximum": "<=", "le": "<=", "exclusiveMaximum": "<", "lt": "<"}
TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true, false"}
TYPES |= {"array": "list", "object": "mapping", "null": "null"}

GROUPS = {  # of public names: the rooms that they come from, in this order
    "Data": ("convert", "dataset", "analysis.audit", "export", "sources", "collect"),
    "Batches": ("loaders", "sampling"),
    "Training": ("runs", "sweep", "config", "models", "training", "analysis"),
    "Errors": ("errors",),
}

OTHERS = {  # what public names return and take
    "Data": ("dataset.manifest:Manifest", "analysis.audit:Audit", "sources.base:Source"),
    "Batches": (
        *("sampling.draws:Sampler", "sampling.draws:CumulativeWeights"),
        *("sampling.draws:HostFunction", "sampling.draws:Facts", "sampling.registry:strategy"),
        "kernels.draws:Segments",
    ),
    "Training": (
        *("config.recipe:Recipe", "models.base:ModelFacts", "models.base:PlayedWindow"),
        *("artifacts.records:EvaluationReport", "artifacts.records:TaskResult"),
        *("artifacts.records:TargetResult", "sweep.report:SweepResult", "analysis.blame:Blame"),
    ),
}


def python_page() -> str:
    """Return directives for the docstrings of all public names."""
    lines = [
        "# Python",
        "",
        "Everything users need is in `import gear_offline as go`, which loads neither torch nor",
        "CuPy until a name needs it. A group ends with what its names return and take, with the",
        "modules that have it.",
        "",
    ]
    left = {name: getattr(gear_offline, name) for name in gear_offline.__all__}
    del left["__version__"]
    for title, rooms in GROUPS.items():
        lines += [f"## {title}", ""]
        for room in rooms:
            homes = {name: thing.__module__ for name, thing in left.items()}
            for name in [n for n in left if homes[n].startswith(f"gear_offline.{room}")]:
                lines += [f"::: {homes[name]}.{left.pop(name).__qualname__}", ""]
        for place in OTHERS.get(title, ()):
            module, _, name = f"gear_offline.{place}".partition(":")
            lines += [f"::: {module}.{name}", "", f"In `{module}`.", ""]
            lines += [*fields(getattr(import_module(module), name)), ""]
    assert not left, f"in no group: {sorted(left)}"
    return "\n".join(lines)


def fields(thing: Any) -> list[str]:
    """Return a table of the fields of a class that only comments describe."""
    text = inspect.getsource(thing)
    (tree,), source, rows = ast.parse(text).body, text.splitlines(), []
    for line, after in pairwise([*getattr(tree, "body", ()), None]):
        is_field = isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line)
        if not is_field or getattr(line.target, "id", "_")[0] == "_" or is_text(after):
            continue
        kind: Any = line.annotation
        while ast.unparse(kind).startswith("Annotated["):
            kind = kind.slice.elts[0]
        above = source[line.lineno - 2].strip()
        comment = source[line.end_lineno - 1].partition("  # ")[2]
        meaning = comment or (above[2:] if above.startswith("# ") else "")
        kind = ast.unparse(kind).replace("|", "\\|")
        rows.append(f"| `{line.target.id}` | `{kind}` | {meaning} |")
    return ["| field | type | meaning |", "|---|---|---|", *rows] if rows else []


def is_text(node: Any) -> bool:
    """Return true for the docstring of a field."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
