//! The process in which workers try grammars.

use kvasir_cluster_tests::{binary, wait};
use serde_json::{Value, json};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};

const SIGPROF: i32 = 27;

/// Exit status for this schema.
fn tried(schema: &Value) -> ExitStatus {
    let task = json!({
        "syntax": "JsonSchema", "text": schema.to_string(),
        "names": {"tokens": 300, "named": [[299, "</s>"]], "ends": [299]},
    });
    let mut command = binary::command(&["try-grammar"]).unwrap();
    let mut process = command.stdin(Stdio::piped()).spawn().unwrap();
    process.stdin.take().unwrap().write_all(task.to_string().as_bytes()).unwrap();
    let ended = wait::until("it has ended", binary::NODE_TIMEOUT, || process.try_wait().unwrap());
    // Fails if the process has exited, as expected.
    let _ = process.kill();
    ended.unwrap()
}

#[test]
fn a_process_over_its_cpu_limit_is_killed() {
    let object = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    assert!(tried(&object).success());
    // All patterns at once: compiling this would not end within a lifetime.
    let pattern = |at: usize| json!({"type": "string", "pattern": format!("(a|b)*{at}x")});
    let endless = json!({"allOf": (0..50).map(pattern).collect::<Vec<_>>()});
    assert_eq!(tried(&endless).signal(), Some(SIGPROF));
}
