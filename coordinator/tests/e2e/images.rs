//! Images in chats: the three forms, the prompt and the files that a worker gets, routing, refusals.

use super::client::{Reply, post};
use super::fake_worker::{FakeWorker, Setup};
use super::{Rig, model_metadata, until, write_file};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use dispatch::models::ModelEntry;
use metadata::Value as Meta;
use model::ModelFile;
use proto::ids::ModelId;
use proto::message::{GenerateError, GenerateRequest};
use serde_json::{Value, json};
use text::Tokenizer;

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}\
    {% else %}{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}\
    {% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
/// The token of a row.
const ROW: u32 = 260;
/// Rows of each committed image in this model.
const ROWS: usize = 4;

struct Images {
    rig: Rig,
    workers: Vec<FakeWorker>,
    _dir: tempfile::TempDir,
}

impl Images {
    /// A coordinator with a model that sees images, and workers of which these do.
    async fn new(workers: &[bool]) -> Self {
        Self::with(workers, &[]).await
    }

    /// With hosts from which images are fetched.
    async fn with(workers: &[bool], hosts: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tiny.gguf");
        let mut metadata = model_metadata(TEMPLATE, &["<image>"]);
        let config = json!({"model_type": "qwen2_5_vl", "image_token_id": ROW}).to_string();
        let preprocessor = json!({"patch_size": 2, "min_pixels": 16, "max_pixels": 64}).to_string();
        metadata.insert("vision.config", Meta::from(config.as_str()));
        metadata.insert("vision.preprocessor", Meta::from(preprocessor.as_str()));
        write_file(&path, metadata);
        let tokenizer_digest =
            Tokenizer::from_metadata(ModelFile::open(&path).unwrap().metadata()).unwrap().digest();
        let entry = ModelEntry { id: ModelId::new("tiny").unwrap(), path };
        let image_urls = hosts.iter().map(|host| (*host).to_owned()).collect();
        let rig = Rig::bare(|config| (config.models, config.image_urls) = (vec![entry], image_urls)).await;
        let mut joined = Vec::new();
        for (name, images) in ["w1", "w2", "w3"].into_iter().zip(workers) {
            let setup = Setup { tokenizer_digest, images: *images, ..rig.setup(name, 1) };
            joined.push(rig.join_as(setup).await.unwrap());
        }
        Self { rig, workers: joined, _dir: dir }
    }

    async fn post(&self, path: &str, body: &Value) -> Reply {
        post(self.rig.at.http, path, body).await
    }

    fn requests(&self) -> Vec<GenerateRequest> {
        self.workers.iter().flat_map(FakeWorker::requests).collect()
    }
}

/// A committed image.
fn file(name: &str) -> Vec<u8> {
    let images: Value =
        serde_json::from_str(include_str!("../../../tests/fixtures/images/images.json")).unwrap();
    let file = images["files"].as_array().unwrap().iter().find(|file| file["name"] == name).unwrap();
    BASE64_STANDARD.decode(file["file"].as_str().unwrap()).unwrap()
}

fn data_url(file: &[u8]) -> String {
    format!("data:image/png;base64,{}", BASE64_STANDARD.encode(file))
}

fn ok(reply: &Reply) -> Value {
    assert_eq!(reply.status.as_u16(), 200, "{}", reply.text());
    reply.json()
}

fn chat(parts: Value) -> Value {
    json!({"messages": [{"role": "user", "content": parts}], "max_tokens": 2})
}

fn chat_part(file: &[u8]) -> Value {
    json!({"type": "image_url", "image_url": {"url": data_url(file)}})
}

fn block(file: &[u8]) -> Value {
    let data = BASE64_STANDARD.encode(file);
    json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}})
}

/// The text of a prompt, with `#` for each row of an image.
fn text(prompt: &[u32]) -> String {
    let token = |id: &u32| match id {
        256 => "<s>".to_owned(),
        257 => "<e>".to_owned(),
        258 => "<bos>".to_owned(),
        byte if *byte < 256 => char::from(*byte as u8).into(),
        _ => "#".to_owned(),
    };
    prompt.iter().map(token).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_api_sends_the_same_prompt_and_files() {
    let images = Images::new(&[true]).await;
    let (one, two) = (file("png rgb"), file("png turned"));
    let words = |kind: &str, word: &str| json!({"type": kind, "text": word});
    let url = |file: &[u8]| json!({"type": "input_image", "image_url": data_url(file), "detail": "auto"});
    let content = json!([words("input_text", "<image>"), url(&one), words("input_text", "or"), url(&two)]);
    let responses = json!({"input": [{"role": "user", "content": content}], "max_output_tokens": 2});
    let parts = json!([words("text", "<image>"), chat_part(&one), words("text", "or"), chat_part(&two)]);
    let blocks = json!([words("text", "<image>"), block(&one), words("text", "or"), block(&two)]);
    let rows = 2 * ROWS as u64;
    for (path, body, details) in [
        (CHAT, chat(parts), Some(("prompt_tokens", "prompt_tokens_details"))),
        (RESPONSES, responses, Some(("input_tokens", "input_tokens_details"))),
        (MESSAGES, chat(blocks), None),
    ] {
        let answer = ok(&images.post(path, &body).await);
        let request = images.requests().pop().unwrap();
        let expected = "<bos><s>user\n<image>####or####<e>\n<s>assistant\n";
        assert_eq!(text(&request.prompt), expected, "{path}: the client's marker is text");
        let [first, second] = &request.images[..] else { panic!("{:?}", request.images) };
        assert_eq!((&*first.file, &*second.file), (&one[..], &two[..]), "{path}");
        for image in [first, second] {
            let [run] = &image.runs[..] else { panic!("{:?}", image.runs) };
            let ids = &request.prompt[run.start as usize..run.end as usize];
            assert_eq!(ids, vision::image_ids(&image.digest, ROWS), "{path}");
        }
        let usage = &answer["usage"];
        let prompt = request.prompt.len() as u64;
        if let Some((total, details)) = details {
            assert_eq!(usage[total].as_u64(), Some(prompt), "{usage}");
            assert_eq!(usage[details]["image_tokens"].as_u64(), Some(rows), "{usage}");
        } else {
            let count = |name: &str| usage[name].as_u64().unwrap();
            assert_eq!(count("input_tokens") + count("cache_read_input_tokens"), prompt, "{usage}");
        }
    }
}

/// In Ollama's API a message's images are before its text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ollamas_messages_and_prompts_have_images() {
    let images = Images::new(&[true]).await;
    let image = file("png rgb");
    let base64 = json!([BASE64_STANDARD.encode(&image)]);
    let options = json!({"num_predict": 2});
    let user = json!([{"role": "user", "content": "what?", "images": base64}]);
    let chat = json!({"model": "tiny", "messages": user, "options": options, "stream": false});
    let prompt =
        json!({"model": "tiny", "prompt": "what?", "images": base64, "options": options, "stream": false});
    for (path, body) in [("/api/chat", chat), ("/api/generate", prompt)] {
        let answer = ok(&images.post(path, &body).await);
        let request = images.requests().pop().unwrap();
        assert_eq!(text(&request.prompt), "<bos><s>user\n####what?<e>\n<s>assistant\n", "{path}");
        assert_eq!(&*request.images[0].file, &image[..], "{path}");
        assert_eq!(answer["prompt_eval_count"].as_u64(), Some(request.prompt.len() as u64), "{path}");
    }
    let wrong = json!({"messages": [{"role": "user", "content": "q", "images": ["#"]}]});
    let refused = images.post("/api/chat", &wrong).await;
    let message = refused.json()["error"].as_str().unwrap().to_owned();
    assert!(refused.status.as_u16() == 400 && message.starts_with("messages[0].images[0]: "), "{message}");
    let shown = ok(&images.post("/api/show", &json!({"model": "tiny"})).await);
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "vision"]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_are_counted_as_tokens_of_the_vocabulary() {
    let images = Images::new(&[true]).await;
    let file = file("png rgb");
    let tokens = ok(&images.post("/tokenize", &chat(json!([chat_part(&file)]))).await);
    let ids: Vec<u32> = serde_json::from_value(tokens["tokens"].clone()).unwrap();
    assert_eq!(ids.iter().filter(|id| **id == ROW).count(), ROWS, "{tokens}");
    assert!(ids.iter().all(|id| *id <= ROW));
    let counted = ok(&images.post("/v1/messages/count_tokens", &chat(json!([block(&file)]))).await);
    assert_eq!(counted["input_tokens"].as_u64(), Some(ids.len() as u64));
    // A text chat has no field for images.
    let usage = ok(&images.post(CHAT, &chat(json!("q"))).await)["usage"].clone();
    assert!(usage["prompt_tokens_details"].get("image_tokens").is_none(), "{usage}");
}

/// Anthropic's results of tools have images, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn results_of_tools_may_have_images() {
    let images = Images::new(&[true]).await;
    let image = file("png rgb");
    let call = json!({"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}});
    let content = json!([{"type": "text", "text": "see"}, block(&image)]);
    let result = json!({"type": "tool_result", "tool_use_id": "toolu_1", "content": content});
    let body = json!({"max_tokens": 1, "messages": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]},
    ]});
    ok(&images.post(MESSAGES, &body).await);
    let request = images.requests().pop().unwrap();
    assert!(text(&request.prompt).contains("see####"), "{}", text(&request.prompt));
    assert_eq!(request.images.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_many_requests_share_is_decoded_once() {
    let images = Images::new(&[true]).await;
    let body = chat(json!([chat_part(&file("png rgb")), {"type": "text", "text": "q"}]));
    let replies = futures::future::join_all((0..16).map(|_| images.post(CHAT, &body))).await;
    replies.iter().for_each(|reply| drop(ok(reply)));
    let requests = images.requests();
    assert_eq!(requests.len(), 16);
    assert!(requests.iter().all(|request| request.prompt == requests[0].prompt));
    let metric = async |name: &str| images.rig.metric(&format!("{name}_total{{model_name=\"tiny\"}} ")).await;
    assert_eq!(metric("kvasir_images_decoded").await, 1.0);
    assert_eq!(metric("kvasir_images_known").await, 15.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_workers_that_see_images_get_them() {
    let images = Images::new(&[false, true, false]).await;
    let image = file("png rgb");
    for at in 0..6 {
        let reply = images
            .post(CHAT, &chat(json!([chat_part(&image), {"type": "text", "text": at.to_string()}])))
            .await;
        assert_eq!(reply.header("x-kvasir-worker"), "w2", "{}", reply.text());
    }
    let blind = Images::new(&[false]).await;
    ok(&blind.post(CHAT, &chat(json!("q"))).await);
    let refused = blind.post(CHAT, &chat(json!([chat_part(&image)]))).await;
    let field = "messages[0].content[0].image_url.url";
    assert_eq!(refused.error(), (400, "invalid_field".into(), field.into()));
    let reason = "no worker that serves the model tiny sees images";
    assert_eq!(refused.json()["error"]["message"], format!("{field}: {reason}"));
}

/// The next worker gets the images again, with the tokens that the client has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_has_the_images() {
    let images = Images::new(&[true, true]).await;
    images.workers.iter().for_each(|worker| worker.allow_tokens(1));
    let mut body = chat(json!([chat_part(&file("png rgb"))]));
    body["max_tokens"] = json!(3);
    let answer = async { ok(&images.post(CHAT, &body).await) };
    let failure = async {
        until("a worker has the request", async || images.requests().len() == 1).await;
        let first = usize::from(images.workers[0].requests().is_empty());
        images.workers[first].fail(Some(GenerateError::QueueFull));
        images.workers.iter().for_each(|worker| worker.allow_tokens(3));
    };
    let (answer, ()) = tokio::join!(answer, failure);
    assert_eq!(answer["usage"]["completion_tokens"], 3, "{answer}");
    let requests = images.requests();
    let [one, other] = &requests[..] else { panic!("{} requests", requests.len()) };
    assert_eq!((&one.images, &one.prompt), (&other.images, &other.prompt));
    assert_eq!(one.images.len(), 1);
}

/// The checksum of a PNG's chunk.
fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & 0_u32.wrapping_sub(crc & 1)))
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_images_are_refused_by_field() {
    let images = Images::new(&[true]).await;
    let image = file("png rgb");
    let url = |url: String| json!({"type": "image_url", "image_url": {"url": url}});
    let truncated = &image[..image.len() / 2];
    let mut wide = image.clone();
    wide[16..20].copy_from_slice(&20_000u32.to_be_bytes());
    let sum = crc(&wide[12..29]).to_be_bytes();
    wide[29..33].copy_from_slice(&sum);
    let large = BASE64_STANDARD.encode(vec![b'x'; (20 << 20) + 10]);
    let path = "messages[0].content[0].image_url.url";
    for (part, reason) in [
        (url(data_url(b"no image")), "the image is no PNG, JPEG, WebP or GIF file"),
        (url(data_url(b"")), "the image is no PNG, JPEG, WebP or GIF file"),
        (url(data_url(truncated)), "the PNG image is damaged"),
        (url(data_url(&wide)), "the image has 20000 x 7 pixels, the limit is 16384 on each side"),
        (url("data:image/png;base64,AA*A".into()), "is not base64"),
        (url(format!("data:image/png;base64,{large}")), "the limit is 20971520"),
        (url("http://127.0.0.1:1/x.png".into()), "this server fetches no addresses"),
        (url("file:///etc/passwd".into()), "is no data: URL"),
    ] {
        let refused = images.post(CHAT, &chat(json!([part]))).await;
        assert_eq!(refused.error(), (400, "invalid_field".into(), path.into()), "{reason}");
        let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(reason) && message.len() < 300, "{message}");
    }
    let many = vec![chat_part(&image); 65];
    let refused = images.post(CHAT, &chat(json!(many))).await;
    assert_eq!(refused.error().2, "messages[0].content[64].image_url.url");
    // All together are too large, though each is not: none is decoded.
    let half = url(format!("data:image/png;base64,{}", BASE64_STANDARD.encode(vec![b'x'; 12 << 20])));
    let refused = images.post(CHAT, &chat(json!([chat_part(&image), half, half]))).await;
    assert_eq!(refused.error().2, "messages[0].content[2].image_url.url", "{}", refused.text());
    let refused = images.post(MESSAGES, &chat(json!([block(b"x")]))).await.json();
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("messages[0].content[0].source.data: the image is no PNG"), "{message}");
    // The template writes none of an assistant's images, and no part of that kind is read there.
    let body = json!({"messages": [{"role": "assistant", "content": [chat_part(&image)]}]});
    assert_eq!(images.post(CHAT, &body).await.error().2, "messages[0].content[0].type");
    assert!(images.requests().is_empty());
}

/// Whatever the hosts that the operator allows, no private address is connected to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sec_image_addresses() {
    let trap = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    trap.set_nonblocking(true).unwrap();
    let port = trap.local_addr().unwrap().port();
    let refused = async |images: &Images, path: &str, body: Value| {
        let reply = images.post(path, &body).await;
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(reply.status.as_u16(), 400, "{message}");
        message
    };
    let (any, one) = (Images::with(&[true], &["any"]).await, Images::with(&[true], &["img.example"]).await);
    for (host, reason) in [
        ("127.0.0.1", "has no public address"),
        ("localhost", "has no public address"),
        ("[::ffff:127.0.0.1]", "has no public address"),
    ] {
        let url = format!("http://{host}:{port}/x.png");
        let part = json!({"type": "image_url", "image_url": {"url": url}});
        let field = "messages[0].content[0].image_url.url";
        assert_eq!(refused(&any, CHAT, chat(json!([part]))).await, format!("{field}: {host} {reason}"));
        let listed = format!(
            "{field}: the server fetches no images from {host}: the setting image_urls lists the hosts"
        );
        assert_eq!(refused(&one, CHAT, chat(json!([part]))).await, listed);
        assert_eq!(refused(&one, "/tokenize", chat(json!([part]))).await, listed);
        let block = json!({"type": "image", "source": {"type": "url", "url": url}});
        let message = refused(&any, MESSAGES, chat(json!([block]))).await;
        assert_eq!(message, format!("messages[0].content[0].source.url: {host} {reason}"));
        let part = json!({"type": "input_image", "image_url": url});
        let body = json!({"input": [{"role": "user", "content": [part]}]});
        assert_eq!(
            refused(&any, RESPONSES, body).await,
            format!("input[0].content[0].image_url: {host} {reason}")
        );
    }
    // Images in the request need no address.
    ok(&any.post(CHAT, &chat(json!([chat_part(&file("png rgb"))]))).await);
    assert!(trap.accept().is_err(), "an address was connected to");
}
