"""Pages that MkDocs makes of the program itself: commands, options of a recipe, public names."""

from __future__ import annotations

import json
from typing import Any, get_args

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
            names = ", ".join(parameter.opts) if is_option else parameter.name.upper()
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

    def add(model: Any, title: str) -> None:
        rows, inner = [], []
        for name, field in model.model_fields.items():
            parts = [field.annotation, *getattr(field.annotation, "__args__", ())]
            parts = [getattr(part, "__origin__", part) for part in parts]
            sections = [part for part in parts if hasattr(part, "model_fields")]
            if sections:
                kinds = sections if name == "model" else sections[:1]
                for section in (kind for kind in kinds if kind is not OwnModelSettings):
                    of = f", kind {section().kind}" if name == "model" else ""
                    inner.append((section, f"{title}.{name}{of}".lstrip(".")))
                continue
            default = "required" if field.is_required() else f"`{json.dumps(field.get_default())}`"
            values = accepted(model, name)
            rows.append(f"| `{name}` | {values} | {default} | {field.description or ''} |")
        if rows:
            lines.extend([f"## {title}" if title else "## The recipe itself", ""])
            lines.extend(
                ["| option | values | default | meaning |", "|---|---|---|---|", *rows, ""]
            )
        for section, path in inner:
            add(section, path)

    add(Recipe, "")
    return "\n".join(lines)


def accepted(model: Any, name: str) -> str:
    """Return the values that an option takes: its type, its choices, its range."""
    schema = model.model_json_schema()["properties"][name]
    words = []
    for each in schema.get("anyOf", [schema]):
        if "enum" in each or "const" in each:
            words += [f"`{value}`" for value in each.get("enum", [each.get("const")])]
            continue
        kind = TYPES.get(each.get("type"), "section")
        is_number = kind in ("whole number", "number")
        words.append(" ".join([kind, *(ends(model.model_fields[name]) if is_number else [])]))
    return ", ".join(dict.fromkeys(words))


def ends(field: Any) -> list[str]:
    """Return the range of an option's numbers: ``>= 1``."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    inner = [getattr(part, "__metadata__", ()) for part in get_args(field.annotation)]
    facts = [*field.metadata, *(fact for part in inner for fact in part)]
    facts += [each for fact in facts for each in getattr(fact, "metadata", ())]
    found = {k: getattr(fact, k) for fact in facts for k in signs if hasattr(fact, k)}
    texts = [f"{sign} {found[k]:g}" for k, sign in signs.items() if abs(found.get(k, 1e9)) < 1e9]
    return [", ".join(texts)] if texts else []


TYPES = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true, false"}
TYPES |= {"array": "list", "object": "mapping", "null": "null"}

GROUPS = {  # of public names: the rooms that they come from, in this order
    "Data": ("convert", "dataset", "analysis.audit", "export", "sources", "collect"),
    "Batches": ("loaders", "sampling"),
    "Training": ("runs", "sweep", "config", "models", "training", "analysis"),
    "Errors": ("errors",),
}


def python_page() -> str:
    """Return directives for the docstrings of all public names."""
    lines = [
        "# Python",
        "",
        "Everything users need is in `import gear_offline as go`, which loads neither torch nor",
        "CuPy until a name needs it.",
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
    assert not left, f"in no group: {sorted(left)}"
    return "\n".join(lines)
