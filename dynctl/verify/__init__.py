"""The chain of custody of topology: node label, pod label, file, card, taint, router.

Facts are gathered once, joined into one chain a worker, and judged link by link by pure checks.
"""
