"""Measurements by kind of machine: problems, schedules, raw timings and service plans.

`records` holds the plain values, `location` says which database is meant, `store` reads and appends,
`models` and `schema` are the tables and their history. Only `store`, `models` and `schema` need SQLAlchemy.
"""
