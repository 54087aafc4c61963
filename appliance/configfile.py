"""The configuration file as a text that people wrote: change single keys and keep everything else as it is.

    edited(text, changes) -> text       pure: {dotted key: value}, None takes a key out; every other byte stays
    write(path, text)                   replace the file atomically; mode and owner stay, a link is followed

The parser says where a key and its value stand; the text is changed there. (A YAML writer that keeps comments still
indents lists its own way and loses comments behind what is deleted.) Does not: know which keys the environment
overrules. Rules: the new text is read again before it replaces the old one, and must say what was asked and otherwise
what it said before; a file that is not valid, or written in a way that this does not understand, is not touched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance import disk, settings
from appliance.errors import ConfigError
from appliance.regularfile import read_regular
from appliance.settings import KEYS, MOST_BYTES, from_tree, parse, yaml_tree

HEADER = """\
# Configuration of the appliance; every key and its default: docs/configuration.md
# `applianctl config check` reads this file, `applianctl apply` puts it into force.
"""
NEW_MODE = 0o644


def read(path: Path) -> str:
    """The file's text; the header of a new file when there is none. Raises ConfigError when it cannot be read."""
    try:
        return text_of(path)
    except FileNotFoundError:
        return HEADER


def text_of(path: Path, *, closed: str = "check its owner and mode") -> str:
    """The file's text, every line ended as on Unix. Raises FileNotFoundError, and ConfigError when it cannot be read;
    `closed`: what to do where this account may not."""
    try:
        data = read_regular(path, most_bytes=MOST_BYTES)
        if len(data) > MOST_BYTES:
            raise ConfigError(f"{path} is no configuration", why=f"it is larger than {MOST_BYTES >> 10} KiB",
                              do="give another file")
        text = data.decode("utf-8")
    except FileNotFoundError:
        raise
    except PermissionError as error:
        raise ConfigError(f"{path} cannot be read", why=str(error.strerror), do=closed) from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"{path} cannot be read", why=why, do="give a file of text") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def write(path: Path, text: str) -> None:
    """Replace the file in one step. Raises StoreError when the disk refuses."""
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    with disk.mapped(f"cannot write {path}", target.parent):
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        try:
            before = target.stat()
        except FileNotFoundError:
            before = None
        try:
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
            if before is not None and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(draft, before.st_uid, before.st_gid)
            draft.chmod(before.st_mode & 0o7777 if before is not None else NEW_MODE)
            disk.replace(target, text, draft=draft)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise


def edited(text: str, changes: Mapping[str, Any], *, origin: str = "appliance.yaml") -> str:
    """The text with these keys changed. Raises ConfigError when the text is not a valid configuration, a key is
    unknown or a value is wrong."""
    import yaml

    for key, value in changes.items():
        if key not in KEYS:
            raise ConfigError(f"there is no setting `{key}`", do="see `applianctl config show`")
        if value is not None:
            KEYS[key](key, value, origin)
    before = parse(text, origin=origin)
    wanted = {key: settings.get(before.settings, key) for key in before.sources}
    for key, value in changes.items():
        wanted[key] = None if value is None else KEYS[key](key, value, origin)
    wanted = {key: value for key, value in wanted.items() if value is not None}
    from_tree(_tree(wanted), origin=origin)  # raises what is wrong with the whole, such as one half of a pair
    new, after = text, None
    with contextlib.suppress(yaml.YAMLError, ConfigError, LookupError, AttributeError, TypeError):
        for key, value in changes.items():
            new = _changed(new, key.split("."), value)
        after = parse(new, origin=origin)
    if after is None or {key: settings.get(after.settings, key) for key in after.sources} != wanted:
        raise ConfigError(f"{origin} cannot be changed by a program", why="its YAML is written in an unusual way",
                          do=f"set {', '.join(changes)} by hand")
    return new


def value_of(key: str, text: str) -> Any:
    """What `key=text` on a command line means: the YAML value where that fits the key, else the text itself."""
    if key not in KEYS:
        return text
    with contextlib.suppress(ConfigError):
        value, _ = yaml_tree(text, origin=key)
        KEYS[key](key, value, "")
        if value is not None and not isinstance(value, str):
            return value
    return text


def _changed(text: str, parts: list[str], value: Any) -> str:
    """One key changed in the text itself, at the place where the YAML parser saw it: not a byte more."""
    import yaml

    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is None:
        return text if value is None else _ends_in_newline(text) + _lines(parts, value, indent=0)
    if root.flow_style:  # the whole file in braces, as JSON is
        return _flow(_tree_changed(yaml.safe_load(text), parts, value)) + "\n"
    key, found = _entry(root, parts[0])
    if len(parts) == 1 or found is None or (isinstance(found, yaml.ScalarNode) and not found.value):
        inner, at = (value, key) if len(parts) == 1 else ({parts[1]: value}, key)
        if value is None:
            return text if at is None or len(parts) == 2 else _without(text, at, found)
        if at is None:
            return _ends_in_newline(text) + _lines(parts, value, indent=0)
        return _replaced(text, at, found, inner)
    inner_key, inner_value = _entry(found, parts[1])
    if value is None:
        if inner_key is None:
            return text
        if len(found.value) == 1:
            return _without(text, key, found)
    if found.flow_style:
        return _replaced(text, key, found, _tree_changed(yaml.safe_load(text), parts, value)[parts[0]])
    if value is None:
        return _without(text, inner_key, inner_value)
    if inner_key is not None:
        return _replaced(text, inner_key, inner_value, value)
    last = text.find("\n", _end(found))
    head, tail = (text, "") if last < 0 else (text[: last + 1], text[last + 1 :])
    return _ends_in_newline(head) + _lines(parts[1:], value, indent=found.value[0][0].start_mark.column) + tail


def _tree_changed(tree: dict[str, Any], parts: list[str], value: Any) -> dict[str, Any]:
    head, *rest = parts
    new = _tree_changed(tree.get(head) or {}, rest, value) if rest else value
    if new is None or (rest and not new):
        return {key: one for key, one in tree.items() if key != head}
    return {**tree, head: new}


def _entry(mapping: Any, name: str) -> tuple[Any, Any]:
    """Key and value node of a mapping's entry; None, None when it is not there."""
    for key, value in mapping.value:
        if key.value == name:
            return key, value
    return None, None


def _end(node: Any) -> int:
    """Where a node's text ends. A block collection's own mark lies behind the comments that follow it."""
    if isinstance(node.value, str) or node.flow_style or not node.value:
        return int(node.end_mark.index)
    last = node.value[-1]
    return _end(last[1] if isinstance(last, tuple) else last)


def _without(text: str, key: Any, value: Any) -> str:
    """The text without the lines of an entry."""
    start = text.rfind("\n", 0, key.start_mark.index) + 1
    end = text.find("\n", max(_end(value) - 1, key.end_mark.index))
    return text[:start] + ("" if end < 0 else text[end + 1 :])


def _replaced(text: str, key: Any, value: Any, new: Any) -> str:
    """The text with another value of an entry; a comment at the end of its line stays."""
    end = _end(value)
    if isinstance(value.value, str) and value.style in ("|", ">"):
        end -= 1  # the newline belongs to such a text
    return f"{text[: key.end_mark.index]}: {_flow(new)}{text[end:]}"


def _lines(parts: list[str], value: Any, *, indent: int) -> str:
    if len(parts) == 2:
        return f"{' ' * indent}{parts[0]}:\n" + _lines(parts[1:], value, indent=indent + 2)
    return f"{' ' * indent}{parts[0]}: {_flow(value)}\n"


def _flow(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, default_flow_style=True, width=1 << 20, sort_keys=False).removesuffix("...\n").strip()


def _ends_in_newline(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as the tree that a file holds."""
    tree: dict[str, Any] = {}
    for dotted, value in values.items():
        *groups, last = dotted.split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = list(value) if isinstance(value, tuple) else value
    return tree
