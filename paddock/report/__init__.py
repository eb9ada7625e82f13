"""report.html: one self-contained page about one or more runs, and the summary that ends a command that trains.

curves.py    runs -> curves: runs that differ only by seed become a mean with a band; long series are thinned
summary.py   before and after, rewards, time by phase
page.py      all of it as JSON inside page.html, with style.css, charts.js and page.js; written at the end of a run
command.py   `paddock report RUN [RUN ...]`
"""
