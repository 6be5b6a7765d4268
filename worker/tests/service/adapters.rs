//! Adapters of a worker's model: which one a request means.

use crate::{Pair, TIMEOUT, model_id, pair_of, request};
use kvasir_worker::load::LoraSource;
use proto::adapter::{AdapterOrder, AdapterRefusal};
use proto::ids::ModelId;
use proto::message::{GenerateError, GenerateFrame, GenerateRequest};
use std::time::Instant;
use tarpc::context::Context;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/hf/lora-llama/adapter-r4-qv");

fn name(text: &str) -> ModelId {
    ModelId::new(text).unwrap()
}

async fn generate(pair: &Pair, model: ModelId) -> Result<(), GenerateError> {
    let request = GenerateRequest { model, ..request(2) };
    let mut stream = pair.connection.open_generate(&request).await.unwrap();
    while let Some(frame) = stream.next().await {
        match frame.unwrap() {
            GenerateFrame::Finished(_) => return Ok(()),
            GenerateFrame::Failed(error) => return Err(error),
            GenerateFrame::Started(_) | GenerateFrame::Tokens(_) | GenerateFrame::Prompt(_) => {}
        }
    }
    panic!("the stream ended without an end frame");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_means_an_adapter_by_its_digest_as_long_as_it_is_loaded() {
    let lora = vec![LoraSource { name: name("own"), path: FOLDER.into() }];
    let mut pair = pair_of(None, |config| config.engine.lora = lora).await;
    let own = pair.adapters.recv().await.unwrap().remove(0);
    assert_eq!((own.name.as_str(), &own.parent, own.rank, own.ordered), ("own", &model_id(), 4, false));
    let not_found = |model: ModelId| Err(GenerateError::ModelNotFound(model));
    let planned = ModelId::of_adapter(&own.digest);
    assert_eq!(generate(&pair, model_id()).await, Ok(()));
    assert_eq!(generate(&pair, planned.clone()).await, Ok(()));
    assert_eq!(generate(&pair, name("own")).await, not_found(name("own")));

    // Three times as strong.
    let folder = tempfile::tempdir().unwrap();
    let copied = folder.path().join("adapter_model.safetensors");
    std::fs::copy(format!("{FOLDER}/adapter_model.safetensors"), copied).unwrap();
    let config = std::fs::read_to_string(format!("{FOLDER}/adapter_config.json")).unwrap();
    let stronger = config.replace("\"lora_alpha\": 8", "\"lora_alpha\": 24");
    assert_ne!(stronger, config);
    std::fs::write(folder.path().join("adapter_config.json"), stronger).unwrap();

    let api = pair.connection.worker_api().await.unwrap();
    let context = || {
        let mut context = Context::current();
        context.deadline = Instant::now() + TIMEOUT;
        context
    };
    let path = folder.path().to_str().unwrap().to_owned();
    let order = |name: &str| AdapterOrder {
        name: ModelId::new(name).unwrap(),
        parent: model_id(),
        path: path.clone(),
    };
    let taken = api.load_adapter(context(), order("own")).await.unwrap().unwrap_err();
    assert!(taken.to_string().contains("another adapter has this name"), "{taken}");
    let model = api.load_adapter(context(), order("tiny")).await.unwrap().unwrap_err();
    assert!(model.to_string().contains("the name of the model"), "{model}");
    let other = AdapterOrder { parent: name("other"), ..order("new") };
    let other = api.load_adapter(context(), other).await.unwrap().unwrap_err();
    assert!(other.to_string().contains("does not serve other"), "{other}");

    // The name of another adapter: what was planned with the first one is not computed with the second.
    assert_eq!(api.unload_adapter(context(), name("own")).await.unwrap(), Ok(()));
    assert_eq!(pair.adapters.recv().await.unwrap(), []);
    assert_eq!(generate(&pair, planned.clone()).await, not_found(planned.clone()));
    assert_eq!(api.load_adapter(context(), order("own")).await.unwrap(), Ok(()));
    let new = pair.adapters.recv().await.unwrap().remove(0);
    assert!(new.ordered && new.digest != own.digest);
    assert_eq!(generate(&pair, planned.clone()).await, not_found(planned));
    assert_eq!(generate(&pair, ModelId::of_adapter(&new.digest)).await, Ok(()));
    let gone = api.unload_adapter(context(), name("none")).await.unwrap();
    assert_eq!(gone, Err(AdapterRefusal::Unknown(name("none"))));
    pair.worker.stop().await;
}
