"""The page of `report.html`, as a Jinja template; every value goes through the filter `shown` and is escaped."""

TEMPLATE = """\
{% macro figures(part) %}
{{ '%.3f' | format(part.score) }}{% if part.ci_low is not none %}
 [{{ '%.3f' | format(part.ci_low) }}, {{ '%.3f' | format(part.ci_high) }}]{% endif %}
 <span class="soft">(n = {{ part.n }})</span>
{%- endmacro %}
{% macro card(example) %}
<div class="card"><dl>
<dt>sample</dt><dd>{{ example.task | shown }} / {{ example.id | shown }}{% if example.category is not none %}
 ({{ example.category | shown }}){% endif %}</dd>
<dt>input</dt><dd>{{ example.input | shown }}</dd>
<dt>target</dt><dd>{{ example.target | shown }}</dd>
{% if example.error is not none %}
<dt>failed</dt><dd>{{ example.error | shown }}</dd>
{% else %}
<dt>reply</dt><dd>{{ example.output | shown }}{% if example.cut %}
 <span class="soft">(cut at the limit)</span>{% endif %}{% if example.ungraded %}
 <span class="soft">(no grade: it counts as not correct, whether it is or not)</span>{% endif %}</dd>
{% endif %}
</dl></div>
{% endmacro %}
{% set label = '' if scores_are is none else ' (scores ' ~ (scores_are | shown) ~ ')' -%}
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Run {{ run_id | shown }}</title>
<style>
:root { color-scheme: light dark; --ink: #0f172a; --soft: #64748b; --line: #e2e8f0; --page: #f8fafc; --card: #fff;
  --accent: #2563eb; --good: #ecfdf5; }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e8f0; --soft: #94a3b8; --line: #334155; --page: #0f172a;
  --card: #1e293b; --accent: #60a5fa; --good: #064e3b; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 12px; } h3 { font-size: 15px; margin: 16px 0 8px; }
p { margin: 4px 0 12px; } .soft { color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(190px, 1fr)); gap: 12px; margin: 20px 0 0; }
.fact, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.fact dt { color: var(--soft); font-size: 13px; } .fact dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: 16px; }
.plots img { width: 100%; display: block; background: #fff; border: 1px solid var(--line); border-radius: 8px; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; font-size: 13px; white-space: nowrap; }
tr:last-child td { border-bottom: 0; } tr.best td { background: var(--good); }
td.figure { white-space: nowrap; } td.reason { min-width: 220px; }
.card { margin-bottom: 12px; } .card dl { margin: 0; display: grid; grid-template-columns: 90px 1fr; gap: 6px 12px; }
.card dt { color: var(--soft); } .card dd { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
pre { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px;
  font-size: 13px; }
ul { margin: 0; padding-left: 20px; } summary { cursor: pointer; }
</style>
</head>
<body>
<main>
<h1>Run {{ run_id | shown }}</h1>
<p class="soft">Report written {{ written_at | shown }}.
{% if scores_are is none %}The validation score steers the run; it is not a held-out score.{% endif %}</p>
{% if scores_are is not none %}
<p><strong>Every score on this page is {{ scores_are | shown }}: evaluation items were trained on on purpose
(allow_overlap), so it says nothing about other data.</strong></p>
{% endif %}
<dl class="facts">
{% for name, value in facts %}
<div class="fact"><dt>{{ name | shown }}</dt><dd>{{ value | shown }}</dd></div>
{% endfor %}
</dl>

<h2>Rounds{{ label }}</h2>
{% if rounds %}
<div class="scroll"><table>
<thead><tr>{% for name in columns %}<th>{{ name | shown }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rounds %}
<tr{% if row.best %} class="best"{% endif %}>
{% for cell in row.cells %}<td class="{{ 'reason' if loop.last else 'figure' }}">{{ cell | shown }}</td>{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
<p class="soft">Samples that failed count as not correct.
{% for line in answered %}{{ line | shown }} {% endfor %}{% if rounds | selectattr('best') | list %} The best round is
marked.{% endif %}</p>
{% if leads %}
<p>The best round {% for lead in leads %}{{ lead | shown }}{{ "; " if not loop.last else "." }}{% endfor %}</p>
{% endif %}
{% else %}
<p>No round has been evaluated yet.</p>
{% endif %}

{% if plots %}
<h2>Course of the run</h2>
<div class="plots">
{% if plots.score is defined %}<img src="{{ plots.score }}" alt="Score by round{{ label }}">{% endif %}
{% if plots.loss is defined %}<img src="{{ plots.loss }}" alt="Loss and learning rate by step">{% endif %}
</div>
{% endif %}

{% if costs %}
<h2>Tokens and cost</h2>
<div class="scroll"><table>
<thead><tr><th>round</th><th>trained</th><th>prefilled</th><th>sampled</th><th>cost</th></tr></thead>
<tbody>
{% for row in costs %}
<tr>{% for cell in row %}<td class="figure">{{ cell | shown }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
<p class="soft">Steps done again after a kill, and samples asked again, are counted each time. Cost is
in dollars, by the prices of the configuration; without a price for the model it is not known.</p>
{% endif %}

{% if tasks %}
<h2>Tasks{{ label }}</h2>
<div class="scroll"><table>
<thead><tr><th>round</th><th>task</th><th>score</th><th>95 % interval</th><th>n</th><th>errors</th>
<th>of the answered</th><th>the score is</th></tr></thead>
<tbody>
{% for row in tasks %}
<tr>{% for cell in row %}<td>{{ cell | shown }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table></div>
{% endif %}

{% if categories %}
<h2>Score by category{{ label }}</h2>
<div class="scroll"><table>
<thead><tr><th>category</th>{% for number in categories.rounds %}
<th>{{ 'baseline' if number == 0 else 'round ' ~ number }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in categories.rows %}
<tr><td>{{ row.category | shown }}</td>
{% for cell in row.cells %}<td class="figure">{% if cell %}{{ figures(cell) }}{% else %}-{% endif %}</td>{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
<p class="soft">With 95 % intervals, weakest in the last round first: ordered by the upper end of the interval, so that
few samples alone make no weakness. Samples that failed or have no grade are left out.{% if categories.left_out %}
{{ categories.left_out }} stronger categories are left out.{% endif %}</p>
{% endif %}

{% if selections %}
<h2>What was trained on, and why</h2>
{% for selection in selections %}
<div class="card"><strong>Round {{ selection.round }}</strong>: {{ selection.rows }} rows,
{{ selection.distinct }} different
<ul>{% for reason, count in selection.reasons %}<li>{{ count }} × {{ reason | shown }}</li>{% endfor %}</ul></div>
{% endfor %}
{% endif %}

{% for weakness in weaknesses %}
{% if loop.first %}<h2>Where {{ 'the baseline' if examples_round == 0 else 'round ' ~ examples_round }} is weakest</h2>
{% endif %}
<h3>{{ weakness.name | shown }}: {{ figures(weakness) }}</h3>
{% for example in weakness.examples %}{{ card(example) }}{% endfor %}
{% endfor %}

{% if examples_round is not none %}
<h2>What {{ 'the baseline' if examples_round == 0 else 'round ' ~ examples_round }} got wrong</h2>
{% for example in examples %}
{{ card(example) }}
{% else %}
<p>Nothing{% if weaknesses %} else{% else %}: every sample was correct{% endif %}.</p>
{% endfor %}
{% endif %}

{% if notes %}
<h2>Notes</h2>
<ul>{% for note in notes %}<li>{{ note | shown }}</li>{% endfor %}</ul>
{% endif %}

<h2>Configuration</h2>
<details><summary>Show</summary><pre>{{ config | shown }}</pre></details>
</main>
</body>
</html>
"""
