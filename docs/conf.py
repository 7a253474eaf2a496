"""The site of `make docs`: the pages of docs/ and the docstrings. Nothing is downloaded."""

import inspect
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # importing the package must not look for devices
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

project = "ffn_heterogeneity"
author = "The ffn_heterogeneity authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "FFN heterogeneity"  # with an underscore it breaks in the middle of a word
html_show_copyright = False

myst_heading_anchors = 3  # `page.md#a-heading`, down to the third level
suppress_warnings = ["myst.header"]  # Tables in results/ are parts of a report: they begin with ##.

default_role = "code"  # one backtick is code in docstrings, as in Markdown
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

# A name that is documented nowhere is an error (-n -W): only those of other projects are let go.
nitpicky = True
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(jax|jaxlib|flax|numpy|np|pandas|typing|collections|os|pathlib|etils|epath|ml_collections)\..*",
    ),
]


def as_plain_text(app, what, name, obj, options, lines):
    """Before napoleon: |x| and * are mathematics, and what stands before a colon is no type."""
    text = "\n".join(lines)
    if what == "data" and text.strip() == inspect.getdoc(type(obj)):
        text = ""  # of dict itself: the page says what a registry is
    text = re.sub(r"(`[^`]*`)|([|*])", lambda found: found[1] or "\\" + found[2], text)
    text = re.sub(r"(`[^`]*`)(?=\w)", r"\1\\ ", text)  # `Linear`s
    text = re.sub(r"(?m)^( *)Returns:\n( +)", r"\1Returns:\n\2: ", text)
    text, mark, fields = text.partition("Attributes:\n")
    several = r"(?m)^ +\w+(, \w+)+:"  # names with one text
    text += mark + re.sub(several, lambda found: found[0].replace(", ", ",\\ "), fields)
    if what in ("attribute", "property", "data") and text:
        text = ": " + text
    lines[:] = text.split("\n")


def no_field_numbers(app, what, name, obj, skip, options):
    """A hook that leaves out fields of named tuples: "Alias for field number 0" says nothing."""
    return type(obj).__name__ == "_tuplegetter" or None


def setup(app):
    app.connect("autodoc-process-docstring", as_plain_text, priority=100)
    app.connect("autodoc-skip-member", no_field_numbers)
