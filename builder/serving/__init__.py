"""vLLM servers that draftmill starts itself, and the connector that runs inside one."""
