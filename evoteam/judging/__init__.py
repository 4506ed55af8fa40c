"""Judging candidates: a separate, confined process that checks, times and audits them."""
