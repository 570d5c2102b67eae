"""What people write who come from Miles or slime: tables of flags, values and dotted paths, with what each means."""
