//! `kvasir completions` and `kvasir man`: files for shells and for `man`, rendered from the flags.

use crate::Cli;
use anyhow::Context;
use clap::CommandFactory;
use clap_complete::Shell;
use std::io::Write;
use std::path::PathBuf;

/// Prints a script that completes commands and flags in a shell.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  source <(kvasir completions bash)\n  \
    kvasir completions fish > ~/.config/fish/completions/kvasir.fish")]
pub(crate) struct Completions {
    /// The shell that reads the script.
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "kvasir", &mut script);
        Ok(std::io::stdout().write_all(&script)?)
    }
}

/// Writes a manual page for each command.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  kvasir man --out man1 && man -l man1/kvasir-worker.1")]
pub(crate) struct Man {
    /// Directory for the pages; created if it does not exist.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

impl Man {
    pub(crate) fn run(self) -> anyhow::Result<()> {
        let out = self.out;
        let write =
            std::fs::create_dir_all(&out).and_then(|()| clap_mangen::generate_to(Cli::command(), &out));
        write.with_context(|| out.display().to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn every_shell_has_a_script_with_all_visible_commands() {
        for shell in Shell::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "kvasir", &mut script);
            let script = String::from_utf8(script).unwrap();
            for command in Cli::command().get_subcommands().filter(|command| !command.is_hide_set()) {
                assert!(script.contains(command.get_name()), "{shell}: {}", command.get_name());
            }
            assert!(
                script.contains("--kv-disk") || *shell == Shell::Fish && script.contains("kv-disk"),
                "{shell}"
            );
        }
    }

    #[test]
    fn every_visible_command_has_a_page_with_its_flags() {
        let dir = tempfile::tempdir().unwrap();
        Man { out: dir.path().join("man1") }.run().unwrap();
        let page = |name: &str| std::fs::read_to_string(dir.path().join("man1").join(name));
        let mut commands = Vec::new();
        crate::tests::commands(&Cli::command(), "kvasir", &mut commands);
        for (name, command) in commands {
            let hidden = command.is_hide_set();
            let file = name.replace(' ', "-") + ".1";
            let Ok(text) = page(&file) else {
                assert!(hidden, "there is no {file}");
                continue;
            };
            assert!(!hidden, "{file} is of a hidden command");
            for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
                let Some(long) = argument.get_long() else { continue };
                assert!(text.contains(&long.replace('-', "\\-")), "{file} lacks --{long}");
            }
        }
        let listed = std::fs::read_dir(dir.path().join("man1")).unwrap().count();
        assert!(listed > 30, "{listed} pages");
    }
}
