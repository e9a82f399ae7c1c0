"""Findings: the catalogue of codes, and how checks run and report. Pure.

The facts that checks judge come from other rooms; reports are shown by screens.
"""
