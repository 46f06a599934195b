"""The comparison of a sweep as one HTML page that needs nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

HEADINGS = {
    "seeds": "seeds",
    "num_runs": "runs",
    "iteration": "iteration",
    "accuracy_before": "accuracy before",
    "accuracy": "accuracy",
    "worst_seed": "worst seed",
    "best_seed": "best seed",
    "training_reward": "training reward",
}
# Shown inside the cell of `accuracy`.
FOLDED = ("accuracy_low", "accuracy_high", "num_correct", "num_samples")
SHARES = ("accuracy_before", "accuracy", "worst_seed", "best_seed")

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem .35rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid; font-weight: 600; }
td { border-bottom: 1px solid #8886; }
small { opacity: .75; white-space: nowrap; }
figure { margin: 1.5rem 0; background: white; max-width: 44rem; padding: .5rem; }
figure svg { width: 100%; height: auto; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<div class="wide"><table>
<thead><tr>{% for heading in headings %}<th scope="col">{{ heading }}</th>{% endfor %}</tr></thead>
<tbody>
{% for cells in rows %}<tr>{% for cell, note in cells %}<td>{{ cell }}
{%- if note %}<br><small>{{ note }}</small>{% endif %}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
<p>Runs that differ only in their seed are one row. Accuracy is on the held-out prompts at the last
iteration that all runs of the row were evaluated at; samples of all seeds are pooled, and the
interval is the 95% Wilson interval. Seeds share the held-out prompts, so the interval speaks for
these prompts rather than for the whole task.</p>
<figure>{{ svg }}</figure>
</body>
</html>
"""


def comparison_html(rows: Sequence[Mapping[str, Any]], svg: bytes, title: str) -> str:
    """One page with the rows of `comparison.comparison_rows` and the figure drawn from them."""
    columns = [column for column in rows[0] if column not in FOLDED]
    text = svg.decode()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(
        title=title,
        headings=[HEADINGS.get(column, column) for column in columns],
        rows=[[_cell(row, column) for column in columns] for row in rows],
        svg=Markup(text[text.index("<svg") :]),  # ours, without the XML prolog
    )


def _cell(row: Mapping[str, Any], column: str) -> tuple[str, str]:
    """A cell's text, and a small note below it."""
    value = row[column]
    if value is None:
        return "–", ""
    if column == "accuracy":
        interval = f"{row['accuracy_low']:.1%} to {row['accuracy_high']:.1%}"
        return f"{value:.1%}", f"{row['num_correct']} of {row['num_samples']}, {interval}"
    if column in SHARES:
        return f"{value:.1%}", ""
    return f"{value:.4g}" if isinstance(value, float) else str(value), ""
