"""Edits of an open source: a function's columns, shifted rows, episodes that an expression keeps.

Shape legend: N rows, E episodes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache, partial, reduce
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from gear_offline.config.problems import nearest
from gear_offline.core.parts import Kind, admit, digest_of, find_part, is_part, part_name
from gear_offline.core.text import count_text, first_line
from gear_offline.core.types import Array, BoolArray
from gear_offline.data.dataset.schema import fold_episodes
from gear_offline.data.sources.arrays import SAME, Columns, as_rows
from gear_offline.data.sources.base import Piece, Source
from gear_offline.data.sources.columns import common_columns, kinds_of, row_kinds, some_names
from gear_offline.data.sources.flags import FLAGS
from gear_offline.data.sources.input_files import misfit
from gear_offline.errors import InputError

WINDOW_BYTES = 32 << 20  # of episodes that are in memory for a function; a longer one alone
MOST_CHARACTERS = 1000  # of an expression
MOST_SHIFT = 1000  # rows
EXACT_INTEGER = 1 << 53  # up to which float64 holds each one
_RETURN = "_return"  # Python keeps the word for itself
_SHOWN = {_RETURN: "return"}
_OPERATIONS: dict[Any, np.ufunc] = {ast.And: np.logical_and, ast.Or: np.logical_or}
_OPERATIONS |= {ast.Not: np.logical_not, ast.Eq: np.equal, ast.NotEq: np.not_equal}
_OPERATIONS |= {ast.Lt: np.less, ast.LtE: np.less_equal, ast.Gt: np.greater}
_OPERATIONS |= {ast.GtE: np.greater_equal, ast.Add: np.add, ast.Sub: np.subtract}
_OPERATIONS |= {ast.Mult: np.multiply, ast.Div: np.divide, ast.FloorDiv: np.floor_divide}
_OPERATIONS |= {ast.Mod: np.mod, ast.USub: np.negative}

MAPS = Kind(noun="function", group="maps", option="--map", code="USAGE", own={})

EpisodeFunction = Callable[[Columns], Mapping[str, Any]]


def shift_source(source: Source, shift: Mapping[str, int]) -> Source:
    """Return a source whose row t has row ``t + shift`` of the columns that are named.

    So an action that led to its row stands at the row before.  The last rows of an episode, which
    then lack something, are left out; flags go with the largest shift.
    """
    shifts = dict[str, int]()
    for name, by in shift.items():
        below = [c.name for c in source.spec if c.name == name or c.name.startswith(f"{name}/")]
        if not below or type(by) is not int or not 0 <= by <= MOST_SHIFT:
            problem = f"shift {name}={by} is no whole number of rows from 0 to {MOST_SHIFT:,}"
            problem = problem if below else f"shift {name}={by} names no column"
            remedy = "write it like actions=1,rewards=1; columns here: "
            remedy += some_names(column.name for column in source.spec)
            raise InputError("USAGE", problem, remedy=remedy)
        shifts |= dict.fromkeys(below, by)
    if not (most := max(shifts.values(), default=0)):
        return source
    lengths, offsets = source.episodes.lengths, source.episodes.offsets
    if short := int((lengths <= most).sum()):
        source.warn(f"{count_text(short, 'episode')} of no more than {most} rows left out by shift")
    by_column = {c.name: shifts.get(c.name, most * (c.name in FLAGS)) for c in source.spec}

    def read(column: str, start: int, stop: int) -> Array:
        return source.read(column, start + by_column[column], stop + by_column[column])

    long = np.flatnonzero(lengths > most)
    if not long.size:
        problem = f"shift leaves nothing: no episode has more than {count_text(most, 'row')}"
        raise InputError("USAGE", problem, remedy="shift by fewer rows, or mend where episodes end")
    pieces = [Piece(read=read, first=int(offsets[n]), steps=int(lengths[n]) - most) for n in long]
    return source.derive(pieces, episodes=long, lengths=lengths[long] - most)


def find_function(given: str | Callable[..., Any], kind: Kind) -> tuple[Callable[..., Any], str]:
    """Return the function that ``FILE.py:function`` or ``module:function`` names, and its origin.

    The origin has the digest of its file and of what that imports from its folder.
    """
    function: Any = given
    name = part_name(given)
    if isinstance(given, str):
        admit([name])
        function = find_part(kind, name)
    if not callable(function):
        remedy = "give FILE.py:function, module:function or, in Python, a function"
        where = f"{kind.option} {given}"
        raise InputError("USAGE", f"a {type(given).__name__} is no function", where, remedy)
    if not isinstance(name, str):  # an object that is called
        return function, f"{type(function).__module__}:{type(function).__qualname__}"
    part = name if is_part(name) else part_name(function)  # of an entry point
    content = digest_of(part) if is_part(part) else ""
    return function, f"{Path(name).name}{', ' * bool(content)}{content}"


def map_episodes(source: Source, function: EpisodeFunction, numbers: Sequence[int]) -> Source:
    """Return a source of what `function` makes of its episodes, some at a time; their numbers."""
    offsets = source.episodes.offsets
    changes = row_kinds(_call(function, _read(source, 0, int(offsets[1])), numbers[0]))
    kinds = {**kinds_of(source), **changes}
    step_bytes = sum(dtype.itemsize * prod(shape) for dtype, shape in kinds.values())
    # The first episode that begins in each run of so many steps begins a window.
    runs = offsets[:-1] // max(1, WINDOW_BYTES // step_bytes)
    firsts = [*np.unique(runs, return_index=True)[1].tolist(), source.spec.episodes]

    @lru_cache(maxsize=1)
    def window(index: int) -> Columns:
        begin, end = firsts[index : index + 2]
        bounds = offsets[begin : end + 1] - offsets[begin]
        read = _read(source, int(offsets[begin]), int(offsets[end]))
        arrays = {n: np.empty((bounds[-1], *shape), dtype) for n, (dtype, shape) in changes.items()}
        for number, (a, b) in zip(numbers[begin:end], pairwise(bounds.tolist()), strict=True):
            changed = _call(function, {n: rows[a:b] for n, rows in read.items()}, number)
            episode_kinds = f"episode {number}", row_kinds(changed)
            common_columns([(f"episode {numbers[0]}", changes), episode_kinds], remedy=SAME)
            for name, rows in changed.items():
                arrays[name][a:b] = rows
        return read | arrays

    def read_made(index: int, column: str, start: int, stop: int) -> Array:
        return window(index)[column][start:stop]

    steps = np.diff(offsets[firsts]).tolist()
    pieces = [Piece(read=partial(read_made, n), steps=count) for n, count in enumerate(steps)]
    return source.derive(pieces, kinds, by_piece=True)


def _read(source: Source, start: int, stop: int) -> Columns:
    columns = {c.name: source.read(c.name, start, stop).view() for c in source.spec}
    for rows in columns.values():
        rows.setflags(write=False)  # they may be the user's own
    return columns


def _call(function: EpisodeFunction, episode: Columns, number: int) -> Columns:
    """Return the columns that `function` makes of an episode, each with a row for each step."""
    where, steps = f"episode {number}", len(next(iter(episode.values())))
    remedy = "return a dict of columns, one row for each step; what it gets cannot be written to"
    try:
        columns = function(episode)
    except (Exception, SystemExit) as error:  # whatever a user's function raises
        problem = f"the function of map raised {type(error).__name__}: {first_line(error)}"
        raise InputError("USAGE", problem, where, f"{remedy}; see --debug") from error
    if not isinstance(columns, Mapping):
        problem = f"the function of map returned a {type(columns).__name__}"
        raise InputError("USAGE", problem, where, remedy)
    arrays = {str(name): as_rows(rows, str(name), where) for name, rows in columns.items()}
    for name, rows in arrays.items():
        if rows.shape[:1] != (steps,):
            problem = f"the function of map returned shape {rows.shape}"
            problem += f" of {count_text(steps, 'step')}"
            raise misfit(problem, f"{where}, column {name}", remedy)
        if name in FLAGS and not np.array_equal(rows, episode.get(name, ())):
            problem = f"the function of map makes the flag {name}, which was read before it"
            raise InputError("USAGE", problem, where, "--rule, --ends say how episodes end")
    return arrays


def keep_episodes(expression: str, source: Source, numbers: Array) -> BoolArray:
    """Choose the (E,) episodes that an expression keeps, at least one; `numbers` are theirs.

    It compares and calculates with numbers, facts of episodes, and columns of one number a step
    that do not change in any episode.
    """
    where = f"where {expression[:200]}"
    remedy = "compare numbers, join by and, or, not: return > 1000 and length > 50"
    try:
        if len(expression) > MOST_CHARACTERS:
            raise ValueError(f"more than {MOST_CHARACTERS} characters")
        text = re.sub(r"\breturn\b", _RETURN, expression.strip())
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, float):
                node.value = _exact_number(ast.get_source_segment(text, node) or "", node.value)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        facts = {name: _fact(source, _SHOWN.get(name, name), numbers) for name in sorted(names)}
        for name, values in facts.items():
            if count := int(np.isnan(values.astype(np.float64)).sum()):
                problem = f"{_SHOWN.get(name, name)} is NaN in {count_text(count, 'episode')}"
                source.warn(f"{problem}: no > or < of where keeps it")
        with np.errstate(all="ignore"):
            mask = np.asarray(_value(tree.body, facts), np.bool_)
        if mask.shape != (source.spec.episodes,):
            raise ValueError("it says nothing of episodes")
    except InputError as error:
        raise InputError(error.code, error.problem, error.where or where, error.remedy) from error
    except (SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else first_line(error)
        raise InputError("USAGE", problem, where, remedy) from error
    if mask.size and not mask.any():
        problem = f"none of {count_text(mask.size, 'episode')} is kept"
        ends = ((_SHOWN.get(n, n), v.min().item(), v.max().item()) for n, v in facts.items())
        ranges = "; ".join(f"{n} is {_number_text(a)} to {_number_text(b)}" for n, a, b in ends)
        raise InputError("SELECTION", problem, where, ranges)
    return mask


def _exact_number(text: str, number: float) -> Any:
    """Return the number that is written, where a float does not hold each integer."""
    is_long = EXACT_INTEGER <= abs(number) < 1 << 65
    return Fraction(text.replace("_", "")) if is_long else number


def _value(node: ast.AST, facts: Mapping[str, Array]) -> Any:
    """Calculate a part of an expression: (E,), or one number for all."""
    match node:
        case ast.Constant(value=bool() | int() | float() | Fraction() as number):
            return number
        case ast.Name(id=name):
            return facts[name]
        case ast.UnaryOp(op=operation, operand=operand):
            return _calculate(operation, _value(operand, facts))
        case ast.BinOp(left=left, op=operation, right=right):
            return _calculate(operation, _value(left, facts), _value(right, facts))
        case ast.BoolOp(op=operation, values=parts):
            return reduce(partial(_calculate, operation), (_value(p, facts) for p in parts))
        case ast.Compare(left=left, ops=operations, comparators=others):
            pairs = pairwise(_value(term, facts) for term in (left, *others))
            results = (_calculate(o, *two) for o, two in zip(operations, pairs, strict=True))
            return reduce(np.logical_and, results)
    raise ValueError(f"{ast.unparse(node)} is not understood")


def _calculate(operation: ast.AST, *values: Any) -> Any:
    """Calculate in float64, or by Python's integers where it does not hold them."""
    if type(operation) not in _OPERATIONS:
        raise ValueError(f"{type(operation).__name__} is not understood")
    is_float = any(np.asarray(value).dtype.kind == "f" for value in values)
    # beside floats a long number is one too
    arrays = [np.asarray(float(v) if is_float and isinstance(v, Fraction) else v) for v in values]
    wide = [a for a in arrays if a.dtype.kind in "iuO" and a.size]
    is_long = any(a.max() > EXACT_INTEGER or a.min() < -EXACT_INTEGER for a in wide)
    function = _OPERATIONS[type(operation)]
    result = function(*(a.astype(object if is_long else np.float64) for a in arrays))
    is_number = isinstance(operation, ast.USub | ast.operator)
    return result if is_number else np.asarray(result, np.bool_)


def _fact(source: Source, name: str, numbers: Array) -> Array:
    """Return the (E,) values of a name in an expression."""
    facts: dict[str, Array] = {
        "length": source.episodes.lengths,
        "terminated": source.terminated,
        "truncated": source.truncated,
        "episode": numbers,
    }
    if name in facts:
        return facts[name]
    columns = [c.name for c in source.spec if c.shape in ((), (1,)) and c.dtype.kind != "c"]
    if name == "return" and "rewards" in columns:
        return _fold(source, "rewards", np.add, 0.0)
    if name not in columns:
        names = [*facts, *columns, *(["return"] if "rewards" in columns else [])]
        near = nearest(name, names)
        why = source.info.attributes.get("left_out", {}).get(name)
        problem = f"unknown name {name!r}" + (f", did you mean {near!r}?" if near else "")
        problem = f"{name} is no column: {why}" if why else problem
        remedy = f"names are {some_names(names)}, of columns those that stay in an episode"
        raise InputError("USAGE", problem, remedy=remedy)
    return episode_values(source, name)


def episode_values(source: Source, name: str) -> Array:
    """Return the (E,) values of a column of one number a step that does not change in an episode.

    ``USAGE`` if it does.
    """
    dtype = source.spec[name].dtype
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    start, end = (limits.max, limits.min) if limits else (np.inf, -np.inf)
    # only of an episode of nothing but NaN: low is infinite, high NaN
    low, high = _fold(source, name, np.fmin, start), _fold(source, name, np.maximum, end)
    if (changing := np.flatnonzero((low != high) & ~(np.isnan(high) & np.isinf(low)))).size:
        problem = f"the column {name} changes in episode {changing[0]}"
        raise InputError("USAGE", problem, remedy="name columns that do not")
    # a short float is the number that its digits say: 0.1, as NumPy compares it
    return high.astype(dtype).astype("U").astype(np.float64) if dtype.kind == "f" else high


def _fold(source: Source, column: str, function: np.ufunc, start: float) -> Array:
    """Fold the numbers of each episode with a function of two, e.g. to their sum, (E,).

    They are of the column's dtype where `start` is an integer, else float64.
    """
    dtype = source.spec[column].dtype if isinstance(start, int) else np.float64
    values, rows = np.full(source.spec.episodes, start, dtype), source.preferred_rows(column)
    for begin in range(0, source.spec.steps, rows):
        block = source.read(column, begin, min(begin + rows, source.spec.steps))
        block = block.reshape(-1).astype(dtype)
        fold_episodes(function, values, source.episodes.offsets, block, begin)
    return values


def _number_text(number: float) -> str:
    return f"{number:.6g}" if isinstance(number, float) else str(number)
