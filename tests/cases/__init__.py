"""What users of other proxies reported in public, each tried here; `tests/cases.md` has the table."""
