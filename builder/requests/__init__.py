"""Requests to a target server: transport, retries, what a reply must hold."""
