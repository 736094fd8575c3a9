"""SVG files as elements of a page: ids of their own, no style attributes (a strict policy blocks them), colours that
follow the theme.

Every `style="..."` becomes a class of one stylesheet for all figures of the page; a colour that has a role
(`figures_svg.PALETTE`) becomes a CSS variable, every other stays as it was drawn.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from markupsafe import Markup

from specbench.report import rows as read
from specbench.report.figures_svg import PALETTE

_SVG = "{http://www.w3.org/2000/svg}"
_FONT = "'DejaVu Sans'"
_DROPPED = ("metadata", "style", "script", "title", "desc")
_ROLES = {light: role for role, (light, _) in PALETTE.items()}
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}\b")
_NUMBERS = ("d", "x", "y", "transform")
_LONG = re.compile(r"-?\d+\.\d{3,}(?!e)")
_PLAIN = re.compile(r"[^<>{}\\]*")
_ELSEWHERE = re.compile(r"url\((?!#)")


class Sheet:
    """The stylesheet that inlined figures share: one class for each distinct set of declarations."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}

    def class_of(self, declarations: str) -> str:
        """The class that stands for the text of a style attribute; "" where it says nothing that may be said."""
        parts = (part.strip() for part in declarations.split(";"))
        kept = [part for part in parts if part and _PLAIN.fullmatch(part) and not _ELSEWHERE.search(part)]
        if not kept:
            return ""
        text = ";".join(re.sub(r":\s+", ":", part, count=1) for part in kept).replace(_FONT, f"{_FONT},Verdana")
        text = _COLOUR.sub(lambda match: themed_colour(match[0]), text)
        return self._classes.setdefault(text, f"f{len(self._classes)}")

    def css(self) -> str:
        return "\n".join(f".fig .{name}{{{text}}}" for text, name in self._classes.items())


def themed_colour(colour: str) -> str:
    """`var(--sb-ROLE)` for a colour that has a role in the palette, else the colour itself."""
    role = _ROLES.get(colour.lower())
    return colour if role is None else f"var(--sb-{role})"


def palette_css(dark: bool) -> str:
    """The palette's variables for one theme."""
    return "".join(f"--sb-{role}:{pair[dark]};" for role, pair in PALETTE.items())


def inline_svg(source: str, prefix: str, title: str, description: str, sheet: Sheet | None = None) -> Markup:
    """An SVG file as an element for HTML: ids made unique by `prefix`, no metadata, no namespaces, no fixed size, no
    scripts and no style attributes. Raises xml.etree.ElementTree.ParseError where it's no XML."""
    sheet = Sheet() if sheet is None else sheet
    root = ElementTree.fromstring(source)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(_SVG) in _DROPPED:
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
        attributes = {name.rpartition("}")[2]: value for name, value in element.attrib.items()}
        element.attrib.clear()
        for name, value in attributes.items():
            if name == "style":
                classes = [attributes.get("class", ""), sheet.class_of(value.replace("url(#", f"url(#{prefix}-"))]
                element.set("class", " ".join(part for part in classes if part))
            elif not name.startswith("on") and name not in element.attrib:
                element.set(name, _own(name, value, prefix))
    view = root.get("viewBox", "0 0 1 1")
    root.attrib = {"class": "fig", "viewBox": view, "role": "img", "aria-labelledby": f"{prefix}-t {prefix}-d"}
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        words = ElementTree.Element(tag, {"id": f"{prefix}-{tag[0]}"})
        words.text = read.plain(text)
        root.insert(place, words)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _own(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href":
        return f"#{prefix}-{value[1:]}" if value.startswith("#") else _image(value)
    if name in _NUMBERS:
        return _LONG.sub(lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), value)
    return value.replace("url(#", f"url(#{prefix}-")


def _image(value: str) -> str:
    """An embedded picture stays; an address of anywhere else doesn't."""
    return value if value.startswith("data:image/png;base64,") else "#"
