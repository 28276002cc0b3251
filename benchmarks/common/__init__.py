"""What the benchmarks have in common, a file an idea.

`commands` has the options of command lines and the body of the papers' scripts, `processes` runs work in a process of its own,
`results` stamps, writes and reads JSON files, `tables` and `pictures` lay out what is shown. `unavoidable` is a bound that
several hold their peaks against.
"""
