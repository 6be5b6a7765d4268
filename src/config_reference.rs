//! Renders docs/config.md from the settings' definitions.

use crate::Cli;
use crate::coordinator::CoordinatorSettings;
use crate::worker::WorkerSettings;
use clap::CommandFactory;
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

const HEAD: &str = "# Settings

A node's settings come from `--config FILE.toml`, then `KVASIR_*` variables, then flags; later ones take precedence. An
unknown field or a value of the wrong type ends the node with exit code 64 and the field's name. `--check-config` prints
the settings in effect as a file, `--explain` each computed value with its reason. Sizes are written as `65536`,
`512MiB` or `2GB`, times as `250ms`, `30s`, `5m`, `1h` or `30d`.

A test compares this page with the code: `UPDATE_DOCS=1 cargo test -p kvasir config_reference` writes it again.
";

const KEYS: &str = "
`[[keys]]`, in the file only, lists the API keys at the start; `kvasir keys create` adds more at run time:

| field | what |
|---|---|
| `sha256` | SHA-256 of the key, in hexadecimal |
| `tenant` | tenant of the key: 1 to 63 characters of `a-z`, `0-9`, `-`, `_` and `.` |
| `admin` | whether the key allows `/admin/v1` on the ops port from other machines; `false` |
";

fn escaped(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

/// Table of a subcommand's settings: its flags that have a variable.
fn table(subcommand: &str) -> (String, BTreeSet<String>) {
    let command = Cli::command();
    let node = command.find_subcommand(subcommand).unwrap();
    let mut text =
        format!("\n## `kvasir {subcommand}`\n\n| field | variable | value | what |\n|---|---|---|---|\n");
    let mut fields = BTreeSet::new();
    for argument in node.get_arguments() {
        let Some(variable) = argument.get_env() else { continue };
        let field = argument.get_id().as_str();
        fields.insert(field.to_owned());
        if argument.is_hide_set() {
            continue;
        }
        let choices = argument.get_possible_values();
        let value = if choices.is_empty() {
            let names = argument.get_value_names().unwrap_or_default();
            names.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        } else {
            let shown = choices.iter().filter(|choice| !choice.is_hide_set());
            shown.map(|choice| format!("`{}`", choice.get_name())).collect::<Vec<_>>().join(", ")
        };
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let variable = variable.to_string_lossy();
        writeln!(text, "| `{field}` | `{variable}` | {} | {} |", escaped(&value), escaped(&help)).unwrap();
    }
    (text, fields)
}

/// Field names that a file may have, taken from the error about an unknown field.
fn fields_of<T: DeserializeOwned>() -> BTreeSet<String> {
    let Err(error) = toml::from_str::<T>("no_such_field = 1") else { panic!("any field is taken") };
    let (_, fields) = error.message().split_once("expected one of").unwrap();
    fields.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn the_reference_of_settings_is_what_the_code_has() {
    let (coordinator, mut fields) = table("coordinator");
    fields.insert("keys".to_owned());
    assert_eq!(fields_of::<CoordinatorSettings>(), fields);
    let (worker, fields) = table("worker");
    assert_eq!(fields_of::<WorkerSettings>(), fields);
    let rendered = format!("{HEAD}{coordinator}{KEYS}{worker}");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/config.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &rendered).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == rendered, "docs/config.md differs from the code: UPDATE_DOCS=1 writes it again");
}
