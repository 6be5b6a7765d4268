//! The `kvasir` command. Each subcommand has one file; libraries do the work.
//!
//! Exit codes: 0 ok, 1 failed, 2 bad usage, 64 bad configuration. stdout carries results, stderr the rest.

mod access;
mod admin;
mod allocator;
mod apply;
mod batch;
mod bench;
mod ca;
mod cluster_key;
mod columns;
mod completions;
mod config;
#[cfg(test)]
mod config_reference;
mod convert;
mod coordinator;
mod coordinators;
mod cpus;
mod deploy;
mod doctor;
mod drain;
mod embed;
mod external;
mod fleet_file;
mod front;
mod gpu_bench;
mod gpu_check;
mod home;
mod hosting;
mod http_client;
mod identity;
mod join;
mod keys;
mod local;
mod logging;
mod logits;
mod lora;
mod models;
mod node;
mod nodes;
mod notify;
mod numerics;
mod operation;
mod ops_client;
mod otlp;
mod perplexity;
mod plan;
mod prefix;
mod progress;
mod replica;
mod role;
mod run;
mod shipped;
mod snapshot;
mod spec;
mod stage;
mod status;
mod tenants;
mod tls;
mod tokenize;
mod top;
mod try_grammar;
mod try_onnx;
mod unblock;
mod up;
mod usage;
mod worker;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser};
use config::{ConfigError, UsageError};
use group::placement::PlacementError;
use proto::log::Log;
use std::io::{ErrorKind as IoErrorKind, IsTerminal};
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit code for an invalid configuration (`EX_USAGE` of sysexits).
const BAD_CONFIG: u8 = 64;
/// Exit code for invalid flags, the same as clap's.
const BAD_USAGE: u8 = 2;

/// Serves large language models from many machines as if they were one.
#[derive(Parser)]
#[command(name = "kvasir", version, arg_required_else_help = true, max_term_width = 100)]
#[command(
    after_help = "Example:\n  kvasir up                 a cluster on this machine, with its API on http://127.0.0.1:8080"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// A new subcommand is a file with a `clap::Args` struct that has `run`, and one line here and below.
#[derive(clap::Subcommand)]
enum Command {
    Up(up::Up),
    Coordinator(coordinator::Coordinator),
    Worker(Box<worker::Worker>),
    Stage(stage::Stage),
    Run(run::Run),
    Batch(batch::BatchCommand),
    Logits(logits::Logits),
    Perplexity(perplexity::Perplexity),
    Embed(embed::Embed),
    Operation(operation::OperationCommand),
    Bench(bench::Bench),
    Plan(plan::Plan),
    GpuCheck(gpu_check::GpuCheck),
    GpuBench(gpu_bench::GpuBench),
    Tokenize(tokenize::Tokenize),
    Models(models::Models),
    Apply(apply::Apply),
    Status(status::Status),
    Top(top::Top),
    Doctor(doctor::Doctor),
    Drain(drain::Drain),
    Undrain(drain::Undrain),
    #[command(alias = "pardon")]
    Unblock(unblock::Unblock),
    Coordinators(coordinators::Coordinators),
    Keys(keys::Keys),
    Tenants(tenants::Tenants),
    Usage(usage::Usage),
    Snapshot(snapshot::Snapshot),
    Prefix(prefix::Prefix),
    Ca(ca::Ca),
    Join(join::Join),
    Nodes(nodes::Nodes),
    Completions(completions::Completions),
    #[command(hide = true)]
    Man(completions::Man),
    #[command(hide = true)]
    TryGrammar(try_grammar::TryGrammar),
    #[command(hide = true)]
    TryOnnx(try_onnx::TryOnnx),
}

impl Command {
    /// Whether the command writes private files. Downloaded models and distributed certificates are public.
    fn keeps_secrets(&self) -> bool {
        matches!(
            self,
            Self::Up(_)
                | Self::Coordinator(_)
                | Self::Worker(_)
                | Self::Stage(_)
                | Self::Run(_)
                | Self::Logits(_)
                | Self::Doctor(_)
                | Self::Snapshot(_)
                | Self::Keys(_)
                | Self::Join(_)
        )
    }

    fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Up(command) => command.run(),
            Self::Coordinator(command) => command.run(),
            Self::Worker(command) => command.run(),
            Self::Stage(command) => command.run(),
            Self::Run(command) => command.run(),
            Self::Batch(command) => command.run(),
            Self::Logits(command) => command.run(),
            Self::Perplexity(command) => command.run(),
            Self::Embed(command) => command.run(),
            Self::Operation(command) => command.run(),
            Self::Bench(command) => command.run(),
            Self::Plan(command) => command.run(),
            Self::GpuCheck(command) => command.run(),
            Self::GpuBench(command) => command.run(),
            Self::Tokenize(command) => command.run(),
            Self::Models(command) => command.run(),
            Self::Apply(command) => command.run(),
            Self::Status(command) => command.run(),
            Self::Top(command) => command.run(),
            Self::Doctor(command) => command.run(),
            Self::Drain(command) => command.run(),
            Self::Undrain(command) => command.run(),
            Self::Unblock(command) => command.run(),
            Self::Coordinators(command) => command.run(),
            Self::Keys(command) => command.run(),
            Self::Tenants(command) => command.run(),
            Self::Usage(command) => command.run(),
            Self::Snapshot(command) => command.run(),
            Self::Prefix(command) => command.run(),
            Self::Ca(command) => command.run(),
            Self::Join(command) => command.run(),
            Self::Nodes(command) => command.run(),
            Self::Completions(command) => command.run(),
            Self::Man(command) => command.run(),
            Self::TryGrammar(command) => command.run(),
            Self::TryOnnx(command) => command.run(),
        }
    }
}

fn main() -> ExitCode {
    let mut log = logging::start();
    let _flushed = logging::FlushAtEnd;
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return bad_usage(&mut log, &error),
    };
    try_onnx::in_use();
    if cli.command.keeps_secrets() {
        // Files of a node, such as prompts in a cache, must be private.
        rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    }
    match cli.command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            logging::write_text(&mut log, &format!("kvasir: {}\n", logging::in_one_line(&error)));
            if error.chain().any(is_usage) {
                ExitCode::from(BAD_USAGE)
            } else if error.chain().any(is_configuration) {
                ExitCode::from(BAD_CONFIG)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

/// Whether the error is a flag that the model or another flag excludes.
fn is_usage(cause: &(dyn std::error::Error + 'static)) -> bool {
    cause.is::<UsageError>()
        || matches!(cause.downcast_ref(), Some(PlacementError::Shards { .. }))
        || matches!(cause.downcast_ref(), Some(::worker::Error::Shards(_)))
        || matches!(cause.downcast_ref(), Some(pipeline::Error::Shards(_)))
}

/// The error of an engine that a library failed with, if the cause is one.
fn engine_error<'a>(cause: &'a (dyn std::error::Error + 'static)) -> Option<&'a engine::Error> {
    match (cause.downcast_ref(), cause.downcast_ref()) {
        (Some(::worker::Error::Engine(error)), _) | (_, Some(pipeline::Error::Engine(error))) => Some(error),
        _ => cause.downcast_ref(),
    }
}

/// Whether the error is an invalid setting in a file, a flag or the environment.
fn is_configuration(cause: &(dyn std::error::Error + 'static)) -> bool {
    let of_engine = engine_error(cause);
    let of_speech = match of_engine {
        Some(engine::Error::Speech(error)) => Some(error),
        _ => cause.downcast_ref(),
    };
    cause.is::<ConfigError>()
        || matches!(of_engine, Some(engine::Error::Config { .. }))
        || matches!(cause.downcast_ref(), Some(::worker::Error::Backend(_)))
        || matches!(of_speech, Some(speech::Error::Config { .. } | speech::Error::Backend(_)))
}

/// Exits with 2 for usage errors, as clap does, and with 0 for `--help` and `--version`. An invalid value
/// from a `KVASIR_*` variable is a configuration error, not a usage error.
fn bad_usage(log: &mut Log, error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::ValueValidation | ErrorKind::InvalidValue)
        && let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg)
        && let Some(flag) = argument.split(' ').next().and_then(|flag| flag.strip_prefix("--"))
        && !std::env::args()
            .any(|given| given.strip_prefix("--").is_some_and(|g| g.split('=').next() == Some(flag)))
        && let Some(variable) = variable_of(flag)
    {
        let rendered = error.to_string();
        let reason = rendered.lines().next().unwrap_or_default().trim_start_matches("error: ");
        let error = ConfigError::Environment(format!("{variable}: {reason}"));
        logging::write_text(log, &format!("kvasir: {error}\n"));
        return ExitCode::from(BAD_CONFIG);
    }
    if error.use_stderr() && !std::io::stderr().is_terminal() {
        logging::write_text(log, &error.render().to_string());
    } else {
        // If printing the error fails, nothing else can be done.
        let _ = error.print();
    }
    ExitCode::from(error.exit_code().clamp(0, 255) as u8)
}

/// The variable that sets `flag` of the given subcommand.
fn variable_of(flag: &str) -> Option<String> {
    let cli = Cli::command();
    let subcommand = std::env::args().nth(1).and_then(|name| cli.find_subcommand(name).cloned())?;
    let argument = subcommand.get_arguments().find(|argument| argument.get_long() == Some(flag))?;
    Some(argument.get_env()?.to_string_lossy().into_owned())
}

/// Whether the reader closed our stdout (`kvasir models list | head -1`), which is not a failure.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == IoErrorKind::BrokenPipe)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every subcommand, nested ones included, with its full name.
    pub(crate) fn commands(parent: &clap::Command, name: &str, found: &mut Vec<(String, clap::Command)>) {
        for command in parent.get_subcommands().filter(|c| c.get_name() != "help") {
            let name = format!("{name} {}", command.get_name());
            found.push((name.clone(), command.clone()));
            commands(command, &name, found);
        }
    }

    #[test]
    fn the_flags_of_all_subcommands_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_subcommand_has_a_help_with_an_example() {
        let mut found = Vec::new();
        commands(&Cli::command(), "kvasir", &mut found);
        assert!(!found.is_empty());
        for (name, mut command) in found {
            let help = command.render_long_help().to_string();
            assert!(help.contains("Example") && help.contains(&name), "{name}:\n{help}");
            for argument in command.get_arguments().filter(|a| a.get_id() != "help") {
                assert!(argument.get_help().is_some(), "{name}: {} has no help", argument.get_id());
            }
        }
    }
}
