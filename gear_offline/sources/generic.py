"""HDF5 files: chooses between D4RL's layouts and the generic one with explicit end flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gear_offline.sources.base import SourceInfo
from gear_offline.sources.boundaries import TERMINAL_FLAGS, TIME_FLAGS, Rule, default_rule
from gear_offline.sources.d4rl import REQUIRED, looks_like_d4rl, open_d4rl
from gear_offline.sources.flat import FlatSource, find_columns
from gear_offline.sources.hdf5 import Hdf5Rows


def open_hdf5(
    path: Path, *, uri: str, name: str, rule: str | None, names: Mapping[str, str] | None = None
) -> FlatSource:
    """Open an HDF5 file of D4RL's or the generic layout.

    Parameters
    ----------
    path
        The file.
    uri
        What the user asked for, for the provenance.
    name
        Dataset or file name that tells D4RL's family.
    rule
        Boundary rule in place of the layout's own.
    names
        As `gear_offline.sources.open_source`.

    Raises
    ------
    InputError
        ``FILE_MISSING``, ``COLUMN_MISSING``, ``RULE_*`` and the guard's ``HDF5_*`` codes.
    """
    rows = Hdf5Rows(path.absolute(), names=names)
    try:
        if looks_like_d4rl(rows):
            return open_d4rl(rows, uri=uri, name=name, rule=rule)
        return _open_generic(rows, uri=uri, rule=rule)
    except BaseException:
        rows.close()
        raise


def _open_generic(rows: Hdf5Rows, *, uri: str, rule: str | None) -> FlatSource:
    flags = [f for f in (*TERMINAL_FLAGS, *TIME_FLAGS) if f in rows.facts]
    layout = find_columns(rows, REQUIRED, ("next_observations", *flags))
    if rule is None:
        rule, warnings = default_rule(flags, where=str(rows.path))
    else:
        warnings = []
    attributes = rows.attributes()
    environment = attributes.get("env_id")
    info = SourceInfo(
        uri=uri,
        format="hdf5",
        rule=rule,
        environment_id=environment if isinstance(environment, str) else None,
        files=(rows.path,),
        opened=rows.identity,
        locator=str(rows.path),
    )
    source = FlatSource(rows, layout, Rule.parse(rule), info)
    source.info = replace(
        info,
        attributes={
            "attributes": attributes,
            "metadata": rows.describe("metadata/"),
            "left_out": layout.left_out,
            "unfinished_tail_steps": source.tail_steps,
            "warnings": source.storage_warnings + warnings,
        },
    )
    return source
