"""Who owns which page: the pool, a sequence's table, the prefix cache, and the store's protocol.

Knows token ids and pages; no model, no text and no database.
"""
