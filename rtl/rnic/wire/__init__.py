"""Frame formats: headers, opcode table, AETH syndromes, PSN arithmetic, ICRC, whole frames in Python (rules 1-6, 9)."""
