//! Generates `docs/reference/command-line.md`.

use clap::{Arg, Command, CommandFactory};

use crate::page::wrap;

/// Text before the commands.
const INTRODUCTION: &str = "<!-- Generated from clap's definitions by crates/trainer/tests/config_reference, which says how to renew it. -->

# Command line

Commands of `float8` with their flags. `float8 COMMAND --help` prints the same. Exit codes: 0; 1 for an error, or a model that does not
fit in `memory`; 2 for a wrong command line; 130, 143, 129 and 138 for a run that a signal ended after it was saved.
";

/// The whole page.
pub fn page() -> String {
    let mut float8 = trainer::cli::Command::command();
    float8.build();
    let mut text = INTRODUCTION.to_string();
    add(&mut text, &mut float8);
    text
}

/// Adds the commands of `command`.
fn add(text: &mut String, command: &mut Command) {
    for command in command.get_subcommands_mut().filter(|command| command.get_name() != "help") {
        if command.has_subcommands() {
            add(text, command);
            continue;
        }
        let usage = command.render_usage().to_string();
        let usage = usage.trim_start_matches("Usage: ");
        let about = command.get_long_about().or(command.get_about()).unwrap().to_string();
        let name = command.get_bin_name().unwrap();
        *text += &format!("\n## {name}\n\n{}\n", wrap("", 0, &sentences(&about)));
        *text += &format!("```text\n{usage}\n```\n");
        let flags: Vec<_> =
            command.get_arguments().filter(|arg| !["help", "version"].contains(&arg.get_id().as_str())).collect();
        if !flags.is_empty() {
            *text += "\n";
        }
        flags.into_iter().for_each(|arg| flag(text, arg));
    }
}

/// Text in one line, with the full stop that clap removes from the end of a short help.
fn sentences(help: &str) -> String {
    let line = help.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.ends_with('.') { line } else { line + "." }
}

fn flag(text: &mut String, arg: &Arg) {
    let help = arg.get_long_help().or(arg.get_help()).unwrap_or_else(|| panic!("{arg} has no help")).to_string();
    let short = arg.get_short().map_or(String::new(), |short| format!("-{short}, "));
    let mut line = format!("**`{short}{arg}`**: {}", sentences(&help));
    let values: Vec<_> = arg.get_possible_values().into_iter().filter(|value| !value.is_hide_set()).collect();
    if arg.get_action().takes_values() && !values.is_empty() {
        let values: Vec<_> = values
            .iter()
            .map(|value| match value.get_help() {
                Some(help) => format!("`{}` ({help})", value.get_name()),
                None => format!("`{}`", value.get_name()),
            })
            .collect();
        line += &format!(" Values: {}.", values.join(", "));
    }
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy().into_owned()).collect();
    if arg.get_action().takes_values() && !defaults.is_empty() {
        line += &format!(" Default: `{}`.", defaults.join(","));
    }
    *text += &wrap("- ", 2, &line);
}
