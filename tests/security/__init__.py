"""What an attacker gets to see, reach and write: the promises of SECURITY.md."""
