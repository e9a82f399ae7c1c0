"""Findings: what a check can find, in one file of codes, and how checks are run and reported.

Pure: facts are gathered elsewhere, and shown elsewhere.
"""
