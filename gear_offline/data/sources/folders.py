"""Folders of files that make one dataset: which of their files are data, and which are one table.

A folder may list its files itself, as Hugging Face's ``save_to_disk`` does, or number them as the
shards of one table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gear_offline.data.sources.base import Source, SourceRequest
from gear_offline.data.sources.columns import some_names
from gear_offline.data.sources.combine import join_sources
from gear_offline.data.sources.formats import FILE_FORMATS, list_formats, open_format
from gear_offline.data.sources.input_files import files_in, read_json
from gear_offline.errors import InputError

# not to train on, or what Hugging Face's map() keeps beside the data
_HELD = re.compile(r"(^|[-_.])(val|valid|validation|test|eval)(?=[-_.]|$)|^cache-[0-9a-f]{16}")
_SHARD = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.(?:parquet|arrow)")


def open_folder(path: Path, request: SourceRequest) -> Source:
    """Open the files of a folder that make one dataset, or those in it where the Hub has them."""
    folder = path.absolute()
    places = _find_places(folder)
    found = [(form, _data_files(p, form.suffixes)) for p in places for form in FILE_FORMATS]
    groups = [(form, files) for form, files in found if files]
    subfolders = [p for p in sorted({*folder.iterdir()} - {*places}) if p.is_dir()]
    aside = [p.name for p in subfolders if _has_data(p)]
    if not groups:
        raise _no_data(path, [p.name for p in subfolders], aside)
    if len(groups) > 1:
        counts = " and ".join(f"{len(f)} like {f[0].relative_to(folder)}" for _, f in groups)
        problem, remedy = "files of several kinds or places", "give each a folder of its own"
        raise InputError("SOURCE_READ", f"{problem}: {counts}", str(folder), remedy)
    [(form, stored)] = groups
    held = [file for file in stored if _HELD.search(file.stem)]
    files = [file for file in stored if file not in held] or stored
    tables, notes = _split_tables(files)
    sources = list[Source]()
    for table in tables:
        if table[1:]:
            how = request._replace(uri=folder.name, shards=table)
            sources.append(open_format(form, table[0].parent, how))
        else:
            sources.append(open_format(form, table[0], request._replace(uri=table[0].name)))
    source = join_sources(sources, uri=folder.name)
    source.warn(*notes)
    aside += [file.name for file in held if file not in files]
    source.warn(*[f"{some_names(aside)} left out: convert apart, or go.join_sources"] * bool(aside))
    return source


def _find_places(folder: Path) -> tuple[Path, ...]:
    """Return the folder and those in it in which its data may be."""
    if _listed_files(folder):
        return (folder,)
    if (splits := folder / "dataset_dict.json").is_file():
        is_train = "train" in read_json(splits).get("splits", ["train"])
        return (folder / "train",) if is_train else ()
    names = ("train",) if _has_data(folder) else ("train", "data")
    return (folder, *(folder / name for name in names if (folder / name).is_dir()))


def _has_data(folder: Path) -> bool:
    return any(files_in(folder, form.suffixes) for form in FILE_FORMATS)


def _no_data(path: Path, subfolders: Sequence[str], aside: Sequence[str]) -> InputError:
    if keys := [name for name in subfolders if "=" in name]:
        problem = f"a folder of partitions, {some_names(keys, 3)}, whose names are a column"
        remedy = f"pyarrow.dataset.dataset({str(path)!r}, partitioning='hive').to_table()"
        remedy = f"in Python: pyarrow.parquet.write_table({remedy}, 'mine.parquet')"
        return InputError("SOURCE_READ", problem, str(path.absolute()), remedy)
    problem = f"the directory {str(path)!r} holds no dataset and no data files"
    problem += f"; give one of those in it: {some_names(aside)}" if aside else ""
    return InputError("SOURCE_READ", problem, remedy=list_formats())


def _data_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files of a folder that are its data: those that it lists itself, if it does."""
    files, listed = files_in(folder, suffixes), _listed_files(folder)
    if (folder / "_delta_log").is_dir() and files:
        remedy = "write its rows as parquet: deltalake.DeltaTable(PATH).to_pyarrow_table()"
        raise InputError("SOURCE_READ", "a Delta table, which keeps old files", str(folder), remedy)
    if not listed:
        return files
    return [folder / name for name in listed] if {*listed} & {f.name for f in files} else []


def _split_tables(files: Sequence[Path]) -> tuple[list[tuple[Path, ...]], list[str]]:
    """Return the files of each table, in order, and a line for each of which some are missing."""
    if _listed_files(files[0].parent):
        return [(*files,)], []
    shards_by_name = dict[tuple[str, int], list[Path]]()
    tables, notes = list[tuple[Path, ...]](), list[str]()
    for file in files:
        shard = _SHARD.fullmatch(file.name)
        key = (shard[1], int(shard[2])) if shard else (file.name, 1)
        shards_by_name.setdefault(key, []).append(file)
    for (name, count), shards in shards_by_name.items():
        is_whole = len(shards) == count
        tables += [(*shards,)] if is_whole else [(file,) for file in shards]
        notes += [f"{len(shards)} of the {count} files of {name} are here"] * (not is_whole)
    return tables, notes


def _listed_files(folder: Path) -> list[str]:
    """Return the files that a folder of Hugging Face's ``save_to_disk`` lists."""
    state = folder / "state.json"
    facts = read_json(state) if state.is_file() else {}
    return [Path(str(file["filename"])).name for file in facts.get("_data_files", ())]
