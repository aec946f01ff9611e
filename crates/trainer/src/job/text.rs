//! [`Text`]: tokenizer and chat templates of a model, and how a configuration opens them.

use anyhow::{Context, Result, bail};

use super::config::RunConfig;
use super::generate_section::GenerateSection;
use crate::hf;
use crate::model::{ModelConfig, ModelSection};
use crate::{ByteTokenizer, ChatTemplate, Message, Tokenizer};

/// Largest vocabulary that uses byte tokens by default.
const MAX_OF_BYTES: usize = 1 << 15;

/// Tokenizer, and chat template if there is one.
#[derive(Debug)]
pub struct Text {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Chat template.
    pub template: Option<ChatTemplate>,
    /// Chat template with the variables of prompts.
    pub prompts: Option<ChatTemplate>,
}

impl Text {
    /// Prompt tokens of `text`, or of a chat in which a user writes `text`.
    ///
    /// # Errors
    /// A model without a chat template, and a text that template or tokenizer refuses.
    pub fn prompt(&self, text: &str, is_chat: bool) -> Result<Vec<u32>> {
        if !is_chat {
            return Ok(self.tokenizer.prompt(text)?);
        }
        let template = self.prompts.as_ref().context(
            "the model has no chat template: set data.chat_template to a Jinja file, or take a checkpoint that brings one",
        )?;
        Ok(template.prompt(&self.tokenizer, &[Message::new("user", text)])?)
    }

    /// Length of the longest form of the section's prompt; `None` if nothing is generated.
    ///
    /// # Errors
    /// As [`prompt`](Self::prompt) of a plain text.
    pub(super) fn longest_prompt(&self, section: &GenerateSection) -> Result<Option<usize>> {
        if section.max_new_tokens == 0 {
            return Ok(None);
        }
        // Whether it is a chat's depends on the data. A template that refuses it only costs the
        // sample.
        let chat = self.prompt(&section.prompt, true).map_or(0, |prompt| prompt.len());
        Ok(Some(self.prompt(&section.prompt, false)?.len().max(chat)))
    }

    /// Tokens that end generation: the tokenizer's, and the one with which the template ends
    /// assistant turns.
    pub fn stop(&self) -> Vec<u32> {
        let mut stop = self.tokenizer.stop().to_vec();
        let end = self.template.as_ref().and_then(|template| template.turn_end(&self.tokenizer));
        stop.extend(end.filter(|end| !self.tokenizer.stop().contains(end)));
        stop
    }
}

impl<S: ModelSection> RunConfig<S> {
    /// Tokenizer of data and samples.
    ///
    /// # Errors
    /// A missing folder, a checkpoint without a tokenizer, and a tokenizer that cannot be read.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        let kept = self.assets.as_ref().filter(|folder| hf::has_tokenizer(folder));
        match (self.data.tokenizer.as_deref(), kept, self.model.hf_path()) {
            (Some(Tokenizer::BYTES), ..) => Ok(Tokenizer::bytes()),
            (_, Some(folder), _) => Ok(Tokenizer::from_folder(folder)?),
            (Some(name), ..) => Ok(Tokenizer::open(name)?),
            (None, None, None) => Ok(Tokenizer::bytes()),
            (None, None, Some(folder)) if !folder.is_dir() => bail!("there is no folder {}", folder.display()),
            (None, None, Some(folder)) if !hf::has_tokenizer(folder) => {
                bail!("no tokenizer in {}: set data.tokenizer to the path of one", folder.display())
            }
            (None, None, Some(folder)) => Ok(Tokenizer::from_folder(folder)?),
        }
    }

    /// Chat template, `data.chat_template` or the tokenizer's, with `data.chat_template_kwargs`.
    ///
    /// # Errors
    /// A chat template that cannot be read.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>> {
        let kwargs = &self.data.chat_template_kwargs;
        Ok(self.plain_template()?.map(|template| template.with_kwargs(kwargs)).transpose()?)
    }

    fn plain_template(&self) -> Result<Option<ChatTemplate>> {
        if let Some(folder) = &self.assets {
            return Ok(ChatTemplate::from_folder(folder)?);
        }
        if let Some(path) = &self.data.chat_template {
            return Ok(Some(ChatTemplate::from_file(path)?));
        }
        match (&self.data.tokenizer, self.model.hf_path()) {
            (Some(name), _) if name != Tokenizer::BYTES => Ok(ChatTemplate::of_tokenizer(name)?),
            (_, Some(folder)) => Ok(ChatTemplate::from_folder(folder)?),
            _ => Ok(None),
        }
    }

    /// Tokenizer and chat templates.
    ///
    /// # Errors
    /// A large vocabulary without a tokenizer; the errors of [`tokenizer`](Self::tokenizer),
    /// [`chat_template`](Self::chat_template), [`dimensions`](Self::dimensions) and
    /// [`Tokenizer::for_vocabulary`].
    pub fn text(&self) -> Result<Text> {
        let (template, kwargs) = (self.chat_template()?, &self.generate.chat_template_kwargs);
        let prompts = template.as_ref().map(|template| template.with_kwargs(kwargs)).transpose()?;
        let (tokenizer, vocab_size) = (self.tokenizer()?, self.dimensions()?.size().vocab_size);
        let is_bytes = tokenizer.format() == Tokenizer::BYTES;
        // With random weights, bytes may be requested explicitly.
        let is_meant = self.data.tokenizer.is_some() && self.model.hf_path().is_none();
        if is_bytes && vocab_size > MAX_OF_BYTES && !is_meant {
            bail!(
                "the model has {vocab_size} tokens, and the tokenizer would be `bytes`, which has {}: set data.tokenizer to the path of the \
                 model's tokenizer; a model of random weights, without model.hf_path, may have \"bytes\" there",
                ByteTokenizer::VOCAB_SIZE
            );
        }
        Ok(Text { tokenizer: tokenizer.for_vocabulary(vocab_size)?, template, prompts })
    }
}
