"""Studies: methods compared by training many runs, from a YAML file to tables and figures.

`config` says what a study is, `plan` which runs it has, `pool` and `worker` train them, `run` keeps
what comes of it, `summary` computes, `tables` and `figures` show.
"""
