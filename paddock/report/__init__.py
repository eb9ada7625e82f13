"""report.html: one self-contained page about one or more runs, and the summary that ends a command that trains."""
