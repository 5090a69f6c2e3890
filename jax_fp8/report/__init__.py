"""The report of a run: one page of HTML, made of the files that it left.

runs/x/ ─read_run→ RunFolder ─find→ findings ─write_report→ report.html
"""
