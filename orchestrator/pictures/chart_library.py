"""uPlot, which draws the charts of pages: its script and its style, out of the installed package `uplot-python`.

Knows no chart: `static/charts.js` hands it the data.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import rjsmin

_PERMISSION = """
Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""
"""The MIT licence, which the package only names."""


@cache
def chart_script() -> str:
    """uPlot's script, minified, below its copyright notice and licence. It defines `uPlot`."""
    source = _text("uPlot.iife.js")
    notice, end, code = source.partition("*/")
    return f"{notice}{_PERMISSION}{end}\n{rjsmin.jsmin(code)}"


@cache
def chart_style() -> str:
    """uPlot's style sheet."""
    return _text("uPlot.min.css")


def _text(name: str) -> str:
    # The package takes 0.1 s to import, and most commands draw no chart.
    import uplot.static

    return resources.files(uplot.static).joinpath(name).read_text(encoding="utf-8")
