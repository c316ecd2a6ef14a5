"""Who is served when: the policies and what they are told. The engine and the simulator drive them alike. No torch."""
