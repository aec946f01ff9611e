//! [`Text`]: tokenizer and chat template of a model.

use anyhow::{Context, Result};

use super::generate_section::GenerateSection;
use crate::{ChatTemplate, Message, Tokenizer};

/// Tokenizer, and chat template if there is one.
#[derive(Debug)]
pub struct Text {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Chat template.
    pub template: Option<ChatTemplate>,
}

impl Text {
    /// Prompt tokens of `text`, or of a chat in which a user writes `text`.
    ///
    /// # Errors
    /// A model without a chat template, and a text that template or tokenizer refuses.
    pub fn prompt(&self, text: &str, is_chat: bool) -> Result<Vec<u32>> {
        if !is_chat {
            return self.tokenizer.prompt(text);
        }
        let template = self.template.as_ref().context(
            "the model has no chat template: set data.chat_template to a Jinja file, or take a checkpoint that brings one",
        )?;
        template.prompt(&self.tokenizer, &[Message::new("user", text)])
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
