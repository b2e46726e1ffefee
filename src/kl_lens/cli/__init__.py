"""The command line: settings from words, and what each verb shows. No logic lives here."""
