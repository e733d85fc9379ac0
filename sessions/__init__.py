"""What outlives the process: conversations, their pages, and the chat that is open on an engine."""
